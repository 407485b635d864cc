//! The answers edge gives itself. SDKs branch on these statuses and texts: see docs/protocols/edge.md.

use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde::Serialize;

use crate::answer_body::AnswerBody;

const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

pub type Answer = Response<AnswerBody>;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SandboxTrouble<'a> {
    sandbox_id: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

#[derive(Serialize)]
struct Trouble<'a> {
    code: u16,
    message: &'a str,
}

pub fn sandbox_not_found(sandbox_id: &str) -> Answer {
    json(
        502,
        &SandboxTrouble {
            sandbox_id,
            message: "The sandbox was not found",
            port: None,
            code: 502,
        },
    )
}

pub fn port_not_open(sandbox_id: &str, port: u16) -> Answer {
    let message = "The sandbox is running but port is not open";
    json(
        502,
        &SandboxTrouble {
            sandbox_id,
            message,
            port: Some(port),
            code: 502,
        },
    )
}

/// Neither gone nor closed: clients must not take the sandbox for dead.
pub fn sandbox_did_not_answer(sandbox_id: &str, port: u16) -> Answer {
    let message = "The sandbox closed the connection without a valid answer";
    json(
        502,
        &SandboxTrouble {
            sandbox_id,
            message,
            port: Some(port),
            code: 502,
        },
    )
}

pub fn refusal(status: u16, message: &str) -> Answer {
    json(
        status,
        &Trouble {
            code: status,
            message,
        },
    )
}

/// 503; `retry` tells SDKs whether asking again is safe.
pub fn unavailable(message: &str, retry: bool) -> Answer {
    let mut answer = json(503, &Trouble { code: 503, message });
    let headers = answer.headers_mut();
    headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    headers.insert(
        SHOULD_RETRY,
        HeaderValue::from_static(if retry { "true" } else { "false" }),
    );
    answer
}

/// For a client that gets no HTTP service at all.
pub const TOO_MANY_CONNECTIONS: &str = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 56\r\n\
    retry-after: 1\r\nshould-retry: true\r\nconnection: close\r\n\r\n\
    {\"code\":503,\"message\":\"Too many connections; try later\"}";

fn json(status: u16, body: &impl Serialize) -> Answer {
    // Strings and numbers cannot fail to serialise.
    let body = serde_json::to_vec(body).unwrap_or_default();
    let mut answer = Response::new(AnswerBody::whole(Bytes::from(body)));
    *answer.status_mut() =
        StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_raw_answer_counts_its_body_right() {
        let (head, body) = TOO_MANY_CONNECTIONS.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("content-length: {}\r\n", body.len())),
            "{}",
            body.len()
        );
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }
}
