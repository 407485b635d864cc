//! Files as the engine sees them: two small traits, so that tests can model failures, torn writes
//! and power loss.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One open file.
pub trait Blob: Send + Sync {
    /// Fills `buffer` from `offset`; an end of file before that is an error.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `data`; after a failure any part of it may have been written.
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()>;
    fn len(&self) -> io::Result<u64>;
    fn set_len(&self, length: u64) -> io::Result<()>;
    /// Data, and the metadata needed to read it, are on stable storage.
    fn sync(&self) -> io::Result<()>;
    /// Begins to write a range out; with `wait` returns when that is done. No durability promise:
    /// the device's cache is not flushed.
    fn write_out(&self, offset: u64, length: u64, wait: bool) -> io::Result<()>;
}

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Read,
    ReadWrite,
    /// For reading and writing; it must not exist.
    CreateNew,
}

/// What tells a file from every other one that exists now: device and inode.
pub type Identity = (u64, u64);

/// Held until it is dropped.
pub type Lock = Box<dyn Send + Sync>;

/// The name space of the host's file systems.
pub trait Files: Send + Sync {
    fn open(&self, path: &Path, mode: Mode) -> io::Result<Arc<dyn Blob>>;
    fn identity(&self, path: &Path) -> io::Result<Identity>;
    /// Over an existing file too.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// EEXIST when `to` exists.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// An absent file is fine.
    fn remove(&self, path: &Path) -> io::Result<()>;
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Keeps other processes and other images out of a directory until the lock is dropped.
    /// `WouldBlock` when it is taken.
    fn lock_dir(&self, path: &Path) -> io::Result<Lock>;
    /// Changes with every restart of the host.
    fn boot_id(&self) -> [u8; 16];
}

/// `path` with `suffix` added to its last part.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Locks a file or directory for as long as this open of it lives, in whatever process.
/// `WouldBlock` when another open has the lock.
pub fn try_lock(file: &File) -> io::Result<()> {
    // SAFETY: a call on a descriptor we own; no memory is passed.
    let failed = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    if failed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The real thing.
pub struct HostFiles {
    boot_id: [u8; 16],
    /// Device of our own mount: a layer there would make the daemon wait for itself.
    own_device: Option<u64>,
}

impl HostFiles {
    pub fn new(own_device: Option<u64>) -> io::Result<Self> {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let value =
            u128::from_str_radix(&text.trim().replace('-', ""), 16).map_err(io::Error::other)?;
        Ok(Self {
            boot_id: value.to_be_bytes(),
            own_device,
        })
    }
}

impl Files for HostFiles {
    fn open(&self, path: &Path, mode: Mode) -> io::Result<Arc<dyn Blob>> {
        let file = OpenOptions::new()
            .read(true)
            .write(mode != Mode::Read)
            .create_new(mode == Mode::CreateNew)
            .mode(0o600)
            // Opening a FIFO must not hang; on regular files the flag means nothing.
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        if self.own_device == Some(metadata.dev()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "inside blockd's own mount",
            ));
        }
        Ok(Arc::new(HostBlob(file)))
    }

    fn identity(&self, path: &Path) -> io::Result<Identity> {
        let metadata = std::fs::metadata(path)?;
        Ok((metadata.dev(), metadata.ino()))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        let [from, to] =
            [from, to].map(|path| std::ffi::CString::new(path.as_os_str().as_encoded_bytes()));
        let (from, to) = (from?, to?);
        // SAFETY: both are NUL-terminated strings that live across the call.
        let failed = unsafe {
            libc::renameat2(
                libc::AT_FDCWD,
                from.as_ptr(),
                libc::AT_FDCWD,
                to.as_ptr(),
                libc::RENAME_NOREPLACE,
            )
        };
        if failed == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn lock_dir(&self, path: &Path) -> io::Result<Lock> {
        let directory = File::open(path)?;
        try_lock(&directory)?;
        Ok(Box::new(directory))
    }

    fn boot_id(&self) -> [u8; 16] {
        self.boot_id
    }
}

struct HostBlob(File);

impl Blob for HostBlob {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write_out(&self, offset: u64, length: u64, wait: bool) -> io::Result<()> {
        let flags = if wait {
            libc::SYNC_FILE_RANGE_WAIT_BEFORE
                | libc::SYNC_FILE_RANGE_WRITE
                | libc::SYNC_FILE_RANGE_WAIT_AFTER
        } else {
            libc::SYNC_FILE_RANGE_WRITE
        };
        // SAFETY: a call on a descriptor we own; no memory is passed.
        let failed = unsafe {
            libc::sync_file_range(
                self.0.as_raw_fd(),
                offset.cast_signed(),
                length.cast_signed(),
                flags,
            )
        };
        if failed == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}
