//! A client's socket: cut hard when told, patient only so long.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::sync::CancellationToken;

use crate::metrics::{METRICS, Present};

/// From the first byte of a request to the end of its head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a client may take nothing of what is ready for it.
const STALL_TIMEOUT: Duration = Duration::from_secs(300);
/// How long a client may go on sending what nobody wants, so that it gets to read the answer; closing with bytes unread destroys it.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const BUSY: u8 = 2;
const FREE: u8 = 3;

/// What the socket and those who serve its requests both know.
pub struct ClientState {
    /// Cancelled: the connection ends with a reset, never with what could pass for a clean end.
    pub cut: CancellationToken,
    phase: AtomicU8,
}

impl ClientState {
    pub fn new(cut: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            cut,
            phase: AtomicU8::new(HEAD),
        })
    }

    /// A request's head has come. Idle again when the guard is dropped.
    pub fn busy(self: &Arc<Self>) -> Busy {
        let _ = self
            .phase
            .fetch_update(Relaxed, Relaxed, |phase| (phase != FREE).then_some(BUSY));
        Busy(Arc::clone(self))
    }

    /// From now on it is a tunnel or HTTP/2: no heads to wait for, and each direction closes for itself.
    pub fn set_free(&self) {
        self.phase.store(FREE, Relaxed);
    }
}

pub struct Busy(Arc<ClientState>);

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.phase.compare_exchange(BUSY, IDLE, Relaxed, Relaxed);
    }
}

pub struct ClientIo {
    stream: TcpStream,
    state: Arc<ClientState>,
    /// Runs while a head is coming in, and again while lingering.
    deadline: Pin<Box<Sleep>>,
    /// Runs while a write waits.
    stall: Option<Pin<Box<Sleep>>>,
    lingers: bool,
    _permit: OwnedSemaphorePermit,
    _present: Present,
}

impl ClientIo {
    pub fn new(stream: TcpStream, state: Arc<ClientState>, permit: OwnedSemaphorePermit) -> Self {
        let present = METRICS.clients.during();
        let deadline = Box::pin(sleep(HEAD_TIMEOUT));
        Self {
            stream,
            state,
            deadline,
            stall: None,
            lingers: false,
            _permit: permit,
            _present: present,
        }
    }

    fn bounded<T>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stall = None;
            return result;
        }
        let stall = self
            .stall
            .get_or_insert_with(|| Box::pin(sleep(STALL_TIMEOUT)));
        ready!(stall.as_mut().poll(cx));
        self.state.cut.cancel();
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl Drop for ClientIo {
    fn drop(&mut self) {
        if self.state.cut.is_cancelled() {
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(cx, buf);
        match self.state.phase.load(Relaxed) {
            IDLE if buf.filled().len() > before => {
                self.deadline.as_mut().reset(Instant::now() + HEAD_TIMEOUT);
                let _ = self
                    .state
                    .phase
                    .compare_exchange(IDLE, HEAD, Relaxed, Relaxed);
            }
            HEAD if result.is_pending() => {
                ready!(self.deadline.as_mut().poll(cx));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            _ => {}
        }
        result
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.bounded(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.bounded(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.lingers {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
            if self.state.phase.load(Relaxed) == FREE {
                return Poll::Ready(Ok(()));
            }
            self.lingers = true;
            self.deadline
                .as_mut()
                .reset(Instant::now() + LINGER_TIMEOUT);
        }
        let mut unwanted = [MaybeUninit::uninit(); 16 * 1024];
        while self.deadline.as_mut().poll(cx).is_pending() {
            let mut buf = ReadBuf::uninit(&mut unwanted);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buf)) {
                Ok(()) if !buf.filled().is_empty() => {}
                _ => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}
