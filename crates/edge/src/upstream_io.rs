//! A socket towards upstream that listens to the end, even to one who has stopped listening.
//!
//! A server may answer before it has read a request, and close: 413 to an upload, 401 to a stream. Writing then fails while the answer is still to be
//! read, and whoever acts on the failure first loses the answer. So a failed write waits here until the other side has said all it had to say.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub struct UpstreamIo<T> {
    stream: T,
    /// Why writing is over, if it is.
    refused: Option<io::ErrorKind>,
    heard_all: bool,
    writer: Option<Waker>,
}

impl<T: AsyncRead + AsyncWrite + Unpin> UpstreamIo<T> {
    pub fn new(stream: T) -> Self {
        Self {
            stream,
            refused: None,
            heard_all: false,
            writer: None,
        }
    }

    fn held_back(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut T>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if self.refused.is_none() {
            match write(Pin::new(&mut self.stream), cx) {
                Poll::Ready(Err(error)) => self.refused = Some(error.kind()),
                other => return other,
            }
        }
        match self.refused {
            Some(kind) if self.heard_all => Poll::Ready(Err(kind.into())),
            _ => {
                self.writer = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for UpstreamIo<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = std::task::ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
        if result.is_ok() && (buf.filled().len() > before || buf.remaining() == 0) {
            return Poll::Ready(Ok(()));
        }
        self.heard_all = true;
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
        // The failed write may have taken the reset that would tell this end from a clean one.
        Poll::Ready(match self.refused {
            Some(kind) => Err(kind.into()),
            None => result,
        })
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for UpstreamIo<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.held_back(cx, |stream, cx| stream.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.held_back(cx, |stream, cx| stream.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn an_answer_before_a_reset_is_heard() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let mut stream = UpstreamIo::new(stream);
        let (mut server, _) = listener.accept().await.unwrap();
        stream.write_all(b"request").await.unwrap();
        server.readable().await.unwrap();
        server.write_all(b"answer").await.unwrap();
        drop(server); // with bytes unread: a reset
        let mut answer = [0; 6];
        for _ in 0..3 {
            assert!(
                timeout(Duration::from_millis(20), stream.write_all(&[0; 1024]))
                    .await
                    .is_err()
            );
        }
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"answer");
        assert!(stream.read(&mut answer).await.is_err(), "not a clean end");
        assert!(stream.write_all(b"more").await.is_err());
    }
}
