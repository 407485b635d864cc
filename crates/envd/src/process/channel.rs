//! The agent's ends of a process's standard streams: pipes, or the master side of a terminal.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A non-blocking descriptor.
pub struct Channel(AsyncFd<OwnedFd>);

impl Channel {
    pub fn new(fd: impl Into<OwnedFd>) -> io::Result<Self> {
        let fd = fd.into();
        fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        // SAFETY: an OwnedFd keeps its descriptor open, and the same, until the AsyncFd that owns it is dropped.
        Ok(Self(unsafe { AsyncFd::register(fd) }?))
    }

    /// Reads what is there, waiting for at least a byte; 0 at the end. A terminal without a process on it is at its end.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let result = self
            .0
            .async_io(Interest::READABLE, |fd| {
                Ok(rustix::io::read(fd, &mut *buffer)?)
            })
            .await;
        match result {
            Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => Ok(0),
            other => other,
        }
    }

    /// Writes all of `data`, waiting while the process does not read. Cancelled half-way, a part has been written.
    pub async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let written = self
                .0
                .async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, data)?))
                .await?;
            data = &data[written..];
        }
        Ok(())
    }

    /// Resizes the terminal this is the master side of; its foreground processes get SIGWINCH.
    pub fn resize(&self, columns: u16, rows: u16) -> io::Result<()> {
        resize(&self.0, columns, rows)
    }
}

/// A new terminal: master side and slave side, the latter owned by `uid`.
pub fn terminal(columns: u16, rows: u16, uid: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags)?;
    unlockpt(&master)?;
    // The peer is opened through the master, so an image without /dev/pts, or with another one, does not matter.
    let slave = ioctl_tiocgptpeer(&master, flags)?;
    resize(&master, columns, rows)?;
    let _ = rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(uid)), None);
    Ok((master, slave))
}

fn resize(master: impl AsFd, columns: u16, rows: u16) -> io::Result<()> {
    let size = Winsize {
        ws_col: columns,
        ws_row: rows,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(tcsetwinsize(master, size)?)
}
