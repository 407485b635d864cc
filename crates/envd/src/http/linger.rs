//! Reading what is left of a refused upload before it is answered.
//!
//! A connection closed with unread data on it is reset, and a reset can overtake the answer: the client would see a broken
//! connection where it should read that the disk is full.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::EXPECT;
use axum::middleware::Next;
use axum::response::Response;
use futures::StreamExt;
use futures::stream::unfold;
use tokio::sync::Mutex;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(10);

/// Passes the request on; when it fails, first takes the rest of its body, for ten seconds at most.
pub async fn drain_refused(request: Request, next: Next) -> Response {
    // Such a client sends nothing until it is told to go on.
    let waiting = request.headers().contains_key(EXPECT);
    let (parts, body) = request.into_parts();
    let content = Arc::new(Mutex::new(body.into_data_stream()));
    let passed_on = unfold(content.clone(), |content| async {
        let piece = content.lock().await.next().await?;
        Some((piece, content))
    });
    let response = next
        .run(Request::from_parts(parts, Body::from_stream(passed_on)))
        .await;
    if !response.status().is_success() && !waiting {
        let rest = async { while let Some(Ok(_)) = content.lock().await.next().await {} };
        let _ = timeout(PATIENCE, rest).await;
    }
    response
}
