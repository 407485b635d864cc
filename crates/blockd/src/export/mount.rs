//! Mounting and unmounting, which need privileges that the daemon gives up in between.
//!
//! A small process forked before that keeps them for one thing: when the daemon has ended, however
//! it ended, it unmounts what the daemon mounted.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::backend::{try_lock, with_suffix};
use crate::error::{Code, Context, Error, Result};

const FILE_SYSTEM: &str = "fuse.blockd";
/// Mounts one on top of the other that a start clears away at most.
const MAX_STALE: usize = 64;

/// How long a start waits for what a dead daemon left to unmount itself.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// The daemon's mount. Dropping it unmounts, and returns when that is done.
pub struct Mount {
    /// Device number.
    pub device: u64,
    /// Closed, by us or by our death, it tells the other process to unmount.
    pipe: Option<PipeWriter>,
    unmounter: libc::pid_t,
}

/// Mounts on `directory` (made if absent), after unmounting what dead daemons left there. Returns
/// the FUSE device too.
///
/// Must be called before the process has threads, since it forks.
pub fn mount(directory: &Path) -> Result<(Mount, OwnedFd)> {
    let directory = resolve(directory)?;
    let lock = lock(&directory)?;
    clear(&directory)?;
    let (reader, pipe) = io::pipe().context(|| "make a pipe".into())?;
    // SAFETY: no other thread exists; the child calls nothing but `unmount_at_end`, which never
    // returns.
    let unmounter = match unsafe { libc::fork() } {
        -1 => return Err(Error::io("fork", &io::Error::last_os_error())),
        0 => unmount_at_end(&reader, &lock, &directory),
        child => child,
    };
    // From here on dropping it tidies up.
    let mut mount = Mount {
        device: 0,
        pipe: Some(pipe),
        unmounter,
    };
    let fuse = open_device()?;
    let options = format!(
        "fd={},rootmode=40711,user_id=0,group_id=0,allow_other,default_permissions",
        fuse.as_raw_fd()
    );
    let [source, kind, options] = ["blockd", FILE_SYSTEM, &options].map(CString::new);
    let (source, kind, options) = (nul_free(source)?, nul_free(kind)?, nul_free(options)?);
    let target = nul_free(CString::new(directory.as_os_str().as_bytes()))?;
    // SAFETY: all pointers are NUL-terminated strings that live across the call.
    let failed = unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
            options.as_ptr().cast(),
        )
    };
    if failed != 0 {
        let error = Error::io(
            format!("mount {}", directory.display()),
            &io::Error::last_os_error(),
        );
        return Err(
            error.with_hint("blockd must be started with CAP_SYS_ADMIN, on a kernel with FUSE")
        );
    }
    mount.device = mounted_device(&directory)?.ok_or_else(|| {
        Error::new(
            Code::Io,
            format!("{} is not mounted after mounting it", directory.display()),
        )
    })?;
    Ok((mount, fuse))
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.pipe = None;
        // SAFETY: waits for our own child; no status is asked for.
        unsafe { libc::waitpid(self.unmounter, std::ptr::null_mut(), 0) };
    }
}

fn nul_free(text: std::result::Result<CString, std::ffi::NulError>) -> Result<CString> {
    text.map_err(|_| Error::invalid("the mount directory's name holds a NUL"))
}

fn open_device() -> Result<OwnedFd> {
    let opened = File::options().read(true).write(true).open("/dev/fuse");
    let hint =
        "FUSE is needed: load the kernel module `fuse`, and give containers the device /dev/fuse";
    opened
        .map(OwnedFd::from)
        .context(|| "open /dev/fuse".into())
        .map_err(|error| error.with_hint(hint))
}

/// The absolute path of a directory that may have a dead mount on it, and so cannot be looked at
/// itself.
fn resolve(directory: &Path) -> Result<PathBuf> {
    let parent = directory
        .parent()
        .ok_or_else(|| Error::invalid("the mount directory must not be the root"))?;
    std::fs::create_dir_all(parent).context(|| format!("make {}", parent.display()))?;
    let parent = parent
        .canonicalize()
        .context(|| format!("resolve {}", parent.display()))?;
    let name = directory
        .file_name()
        .ok_or_else(|| Error::invalid("the mount directory has no name"))?;
    Ok(parent.join(name))
}

/// Makes the directory ours until the returned file is closed, by us and by the unmounting process:
/// neither a second daemon nor the unmounting process of a dead one then works on it.
fn lock(directory: &Path) -> Result<File> {
    let path = with_suffix(directory, ".lock");
    let what = || format!("lock {}", path.display());
    let mut options = File::options();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .context(what)?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match try_lock(&file) {
            Ok(()) => return Ok(file),
            Err(error) if error.kind() != ErrorKind::WouldBlock => {
                return Err(Error::io(what(), &error));
            }
            Err(_) if Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
            Err(_) => {
                return Err(Error::conflict(format!(
                    "another blockd has {}",
                    directory.display()
                )));
            }
        }
    }
}

/// Makes the directory, without a mount of ours on it.
fn clear(directory: &Path) -> Result<()> {
    for _ in 0..MAX_STALE {
        if mounted_device(directory)?.is_none() {
            break;
        }
        log::warn!(
            "unmounting what a dead blockd left on {}",
            directory.display()
        );
        detach(directory).context(|| format!("unmount {}", directory.display()))?;
    }
    match std::fs::create_dir(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(Error::io(format!("make {}", directory.display()), &error))
        }
        _ => Ok(()),
    }
}

fn detach(directory: &Path) -> io::Result<()> {
    let target = CString::new(directory.as_os_str().as_bytes())?;
    // SAFETY: a NUL-terminated string that lives across the call.
    let failed =
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW) };
    if failed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Device number of the topmost mount on `directory`, when that is one of ours.
fn mounted_device(directory: &Path) -> Result<Option<u64>> {
    let table = std::fs::read("/proc/self/mountinfo").context(|| "read the mount table".into())?;
    let mut found = None;
    for line in table.split(|&byte| byte == b'\n') {
        // id parent major:minor root mount-point options… - type source options
        let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
        let kind = fields
            .iter()
            .position(|field| *field == b"-")
            .and_then(|dash| fields.get(dash + 1));
        if let [_, _, device, _, place, ..] = fields[..]
            && unescape(place) == directory.as_os_str().as_bytes()
        {
            found = kind
                .filter(|kind| **kind == FILE_SYSTEM.as_bytes())
                .and_then(|_| device_number(device));
        }
    }
    Ok(found)
}

fn device_number(text: &[u8]) -> Option<u64> {
    let (major, minor) = std::str::from_utf8(text).ok()?.split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// mountinfo writes blanks and backslashes as a backslash and three octal digits.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        rest = after;
        match (byte, after) {
            (
                b'\\',
                [
                    high @ b'0'..=b'3',
                    middle @ b'0'..=b'7',
                    low @ b'0'..=b'7',
                    after @ ..,
                ],
            ) => {
                plain.push((high - b'0') << 6 | (middle - b'0') << 3 | (low - b'0'));
                rest = after;
            }
            _ => plain.push(*byte),
        }
    }
    plain
}

/// The whole life of the unmounting process: waits for the daemon's end, then unmounts. It has the
/// lock as long as it lives, so what is mounted there by then is the daemon's.
fn unmount_at_end(daemon: &PipeReader, lock: &File, directory: &Path) -> ! {
    // SAFETY: plain calls on our own process. All descriptors but two are closed, so that nobody
    // waits for a pipe or socket because of us; of the closed ones none is used again, since this
    // function never returns.
    let mut daemon = unsafe {
        libc::setsid();
        for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::dup2(daemon.as_raw_fd(), 0);
        libc::dup2(lock.as_raw_fd(), 1);
        libc::close_range(2, u32::MAX, 0);
        ManuallyDrop::new(File::from_raw_fd(0))
    };
    // Nothing is ever written; an error ends the wait as the daemon's end does.
    let _ = daemon.read_to_end(&mut Vec::new());
    if let Ok(Some(_)) = mounted_device(directory) {
        let _ = detach(directory);
    }
    // SAFETY: ends the process without running what the daemon registered for its own end.
    unsafe { libc::_exit(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_escapes_of_the_mount_table() {
        assert_eq!(unescape(br"/a\040b\134c\d"), br"/a b\c\d");
        assert_eq!(unescape(br"\777\04"), br"\777\04");
    }
}
