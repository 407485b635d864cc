//! Errors of the plain endpoints: `{"code": status, "message": text}`.

use std::io::{self, ErrorKind};

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

#[derive(Debug)]
pub struct HttpError {
    pub status: StatusCode,
    pub message: String,
}

impl HttpError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    pub fn bad_request(message: String) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    pub fn internal(message: String) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub fn unimplemented(message: &str) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, message)
    }

    /// A failed file operation on `what`.
    pub fn file(what: &str, error: &io::Error) -> Self {
        let status = match error.kind() {
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
            ErrorKind::InvalidInput
            | ErrorKind::InvalidFilename
            | ErrorKind::InvalidData
            | ErrorKind::UnexpectedEof
            | ErrorKind::IsADirectory
            | ErrorKind::NotADirectory
            | ErrorKind::AlreadyExists => StatusCode::BAD_REQUEST,
            _ if error.raw_os_error() == Some(libc::ELOOP) => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, format!("{what}: {error}"))
    }
}

impl From<io::Error> for HttpError {
    fn from(error: io::Error) -> Self {
        Self::internal(error.to_string())
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let body = json!({"code": self.status.as_u16(), "message": self.message});
        (self.status, Json(body)).into_response()
    }
}
