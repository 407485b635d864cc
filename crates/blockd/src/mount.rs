//! Mounting and unmounting, which need privileges that the daemon gives up in between.
//!
//! A small process forked before that keeps them for one thing: when the daemon has ended, however
//! it ended, it unmounts what the daemon mounted.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::{Code, Context, Error, Result};

const FILE_SYSTEM: &str = "fuse.blockd";
/// Mounts one on top of the other that a start clears away at most.
const MAX_STALE: usize = 64;

/// The daemon's mount. Dropping it unmounts, and returns when that is done.
pub struct Mount {
    /// Major and minor number.
    pub device: u64,
    /// Closed, by us or by our death, it tells the other process to unmount.
    pipe: Option<File>,
    unmounter: libc::pid_t,
}

/// Mounts on `directory` (made if absent), after unmounting what dead daemons left there. Returns
/// the FUSE device too.
///
/// Must be called before the process has threads, since it forks.
pub fn mount(directory: &Path) -> Result<(Mount, OwnedFd)> {
    let directory = prepare(directory)?;
    let (reader, mut pipe) = io::pipe()
        .map(|(reader, writer)| {
            (
                File::from(OwnedFd::from(reader)),
                File::from(OwnedFd::from(writer)),
            )
        })
        .context(|| "make a pipe".into())?;
    // SAFETY: no other thread exists; the child calls nothing but `unmount_at_end`, which never
    // returns.
    let unmounter = match unsafe { libc::fork() } {
        -1 => return Err(Error::io("fork", &io::Error::last_os_error())),
        0 => unmount_at_end(reader, &directory),
        child => child,
    };
    drop(reader);
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
    let device = mounted_device(&directory)
        .context(|| "read /proc/self/mountinfo".into())?
        .ok_or_else(|| {
            Error::new(
                Code::Io,
                format!("{} is not mounted after mounting it", directory.display()),
            )
        })?;
    pipe.write_all(&device.to_ne_bytes())
        .context(|| "write to the unmounting process".into())?;
    Ok((
        Mount {
            device,
            pipe: Some(pipe),
            unmounter,
        },
        fuse,
    ))
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

/// The absolute path of a directory that exists and has no mount of ours.
fn prepare(directory: &Path) -> Result<PathBuf> {
    // Not of the directory itself: with a dead mount on it, it cannot be looked at.
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
    let directory = parent.join(name);
    for _ in 0..MAX_STALE {
        if mounted_device(&directory)
            .context(|| "read /proc/self/mountinfo".into())?
            .is_none()
        {
            break;
        }
        log::warn!(
            "unmounting what a dead blockd left on {}",
            directory.display()
        );
        detach(&directory).context(|| format!("unmount {}", directory.display()))?;
    }
    match std::fs::create_dir(&directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::io(format!("make {}", directory.display()), &error))
        }
        _ => Ok(directory),
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
fn mounted_device(directory: &Path) -> io::Result<Option<u64>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
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

/// The whole life of the unmounting process: waits for the daemon's end, then unmounts what it
/// mounted, if it did and nothing else is there since.
fn unmount_at_end(mut reader: File, directory: &Path) -> ! {
    // SAFETY: plain calls on our own process. Descriptors are closed so that nobody waits for a
    // pipe or socket because of us; of those numbers only `reader` is used again.
    unsafe {
        libc::setsid();
        libc::signal(libc::SIGTERM, libc::SIG_IGN);
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        libc::signal(libc::SIGINT, libc::SIG_IGN);
        let moved = libc::dup2(reader.as_raw_fd(), 0);
        libc::close_range(1, u32::MAX, 0);
        std::mem::forget(std::mem::replace(&mut reader, File::from_raw_fd(moved)));
    }
    let mut device = Vec::new();
    let _ = reader.read_to_end(&mut device);
    let device = <[u8; 8]>::try_from(device).map(u64::from_ne_bytes);
    if device.is_ok() && mounted_device(directory).ok().flatten() == device.ok() {
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
