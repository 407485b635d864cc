//! The body of an answer: edge's own few bytes, or a stream from upstream that holds what the exchange needs until it ends.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::client_io::Busy;
use crate::metrics::METRICS;
use crate::routes::Attachment;
use crate::upstream::Lease;

pub struct AnswerBody {
    content: Content,
    /// The client's connection waits for the next request once this is dropped.
    busy: Option<Busy>,
}

enum Content {
    Whole(Option<Bytes>),
    Stream(Box<Stream>),
}

struct Stream {
    incoming: Incoming,
    lease: Option<Lease>,
    attachment: Option<Attachment>,
    cut: CancellationToken,
    /// HTTP/2 only: there the stream is reset, not the connection.
    cut_fired: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl AnswerBody {
    pub fn whole(bytes: Bytes) -> Self {
        Self {
            content: Content::Whole(Some(bytes)),
            busy: None,
        }
    }

    /// `cut` is cancelled when the stream breaks off, so that a client can never take that for its end.
    pub fn stream(
        incoming: Incoming,
        lease: Lease,
        attachment: Option<Attachment>,
        cut: CancellationToken,
        resets_stream: bool,
    ) -> Self {
        let cut_fired = resets_stream.then(|| Box::pin(cut.clone().cancelled_owned()));
        let mut stream = Stream {
            incoming,
            lease: Some(lease),
            attachment,
            cut,
            cut_fired,
        };
        if stream.incoming.is_end_stream() {
            stream.finish();
        }
        Self {
            content: Content::Stream(Box::new(stream)),
            busy: None,
        }
    }

    pub fn keep(mut self, busy: Busy) -> Self {
        self.busy = Some(busy);
        self
    }
}

impl Stream {
    /// All has come: the connection may serve the next, and the route's end is no longer this client's business.
    fn finish(&mut self) {
        self.attachment = None;
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Some(cut_fired) = &mut self.cut_fired
            && self.attachment.is_some()
            && cut_fired.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Some(Err(io::ErrorKind::ConnectionReset.into())));
        }
        match std::task::ready!(Pin::new(&mut self.incoming).poll_frame(cx)) {
            Some(Ok(frame)) => {
                if self.incoming.is_end_stream() {
                    self.finish();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                METRICS.cut.add();
                self.cut.cancel();
                Poll::Ready(Some(Err(io::Error::other(error))))
            }
            None => {
                self.finish();
                Poll::Ready(None)
            }
        }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut self.content {
            Content::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Stream(stream) => stream.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Whole(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Content::Stream(stream) => stream.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
            Content::Stream(stream) => stream.incoming.size_hint(),
        }
    }
}
