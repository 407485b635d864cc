//! A connection whose reads also take in file descriptors.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use parking_lot::Mutex;
use tokio::io::{AsyncWrite, Interest};
use tokio::net::UnixStream;

/// Descriptors that one request may carry; what comes beyond that is closed by the kernel or by us.
pub const MAX_DESCRIPTORS: usize = 4;

/// What came with the bytes read since it was last emptied.
pub type Descriptors = Arc<Mutex<Vec<OwnedFd>>>;

pub struct Connection {
    stream: UnixStream,
    descriptors: Descriptors,
}

impl Connection {
    pub fn new(stream: UnixStream) -> (Self, Descriptors) {
        let descriptors = Descriptors::default();
        (
            Self {
                stream,
                descriptors: descriptors.clone(),
            },
            descriptors,
        )
    }
}

impl Read for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut target: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            // SAFETY: only initialised bytes are ever written to what `as_mut` gives, and only
            // those are advanced over.
            let buffer = unsafe { target.as_mut() };
            let received = self.stream.try_io(Interest::READABLE, || {
                receive(self.stream.as_raw_fd(), buffer)
            });
            match received {
                Ok((length, descriptors)) => {
                    let mut kept = self.descriptors.lock();
                    let room = MAX_DESCRIPTORS.saturating_sub(kept.len());
                    kept.extend(descriptors.into_iter().take(room));
                    // SAFETY: recvmsg(2) wrote `length` bytes to the start of the buffer.
                    unsafe { target.advance(length) };
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl Write for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Space for the control message with [`MAX_DESCRIPTORS`], aligned as `cmsghdr` must be.
type Control = [u64; 8];

/// One recvmsg(2): bytes written to `buffer`, and descriptors that came with them.
fn receive(socket: RawFd, buffer: &mut [MaybeUninit<u8>]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control: Control = [0; 8];
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // SAFETY: msghdr is plain data for which zeros are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of::<Control>();
    // SAFETY: the message points to one buffer and one control area, with their true lengths, alive
    // across the call.
    let length = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    let mut descriptors = Vec::new();
    // SAFETY: the kernel filled the control area and its length; the CMSG functions stay within it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(found) = header.as_ref() {
            if found.cmsg_level == libc::SOL_SOCKET && found.cmsg_type == libc::SCM_RIGHTS {
                let bytes = found.cmsg_len - libc::CMSG_LEN(0) as usize;
                let data: *const RawFd = libc::CMSG_DATA(header).cast();
                for index in 0..bytes / size_of::<RawFd>() {
                    // Each number is a descriptor that the kernel just made for us; nobody else
                    // knows it.
                    descriptors.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((length, descriptors))
}
