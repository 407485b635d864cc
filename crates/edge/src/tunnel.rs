//! After 101 Switching Protocols: bytes both ways, whatever they mean.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tokio_util::sync::CancellationToken;

use crate::metrics::METRICS;
use crate::routes::Attachment;

const BUFFER_BYTES: usize = 16 * 1024;

/// Carries bytes until both sides are done, one breaks, or `cut` is cancelled. Each side's end is passed on by itself.
pub fn spawn(
    client: OnUpgrade,
    upstream: OnUpgrade,
    attachment: Option<Attachment>,
    cut: CancellationToken,
) {
    let broken = cut.clone();
    let carry = async move {
        let (_present, _attachment) = (METRICS.tunnels.during(), attachment);
        let Ok((client, upstream)) = tokio::try_join!(client, upstream) else {
            return;
        };
        let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
        let result =
            copy_bidirectional_with_sizes(&mut client, &mut upstream, BUFFER_BYTES, BUFFER_BYTES)
                .await;
        if result.is_err() {
            METRICS.cut.add();
            broken.cancel();
        }
    };
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = cut.cancelled() => {}
            () = carry => {}
        }
    });
}
