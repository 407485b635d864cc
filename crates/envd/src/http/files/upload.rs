//! `POST /files`.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequest, Multipart, Query, Request, State};
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use serde::Serialize;

use super::{Parameters, user};
use crate::environment;
use crate::filesystem::writing::{Encoding, Writer};
use crate::http::auth;
use crate::http::error::HttpError;
use crate::state::Agent;
use crate::users::User;

#[derive(Serialize)]
struct Written {
    path: String,
    name: String,
    r#type: &'static str,
}

/// Writes one file from an octet stream, or several from a form.
pub async fn upload(
    State(agent): State<Arc<Agent>>,
    Query(parameters): Query<Parameters>,
    request: Request,
) -> Result<Response, HttpError> {
    let headers = request.headers();
    auth::check_files(&agent, headers, parameters.signature.as_deref())?;
    if headers
        .keys()
        .any(|name| name.as_str().starts_with("x-metadata-"))
    {
        return Err(HttpError::unimplemented("file metadata is not supported"));
    }
    let encoding = encoding(headers)?;
    let content_type = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let form = content_type.starts_with("multipart/form-data");
    if !form && !content_type.starts_with("application/octet-stream") {
        let message = format!("unsupported content type '{content_type}'");
        return Err(HttpError::bad_request(message));
    }
    let user = user(&agent, parameters.username).await?;
    let mut destination = Destination {
        user,
        default_path: parameters.path,
        seen: HashSet::new(),
        agent,
    };
    let written = if form {
        upload_form(request, &mut destination, encoding).await?
    } else {
        if destination.default_path.is_empty() {
            return Err(HttpError::bad_request(
                "the path query parameter is required".into(),
            ));
        }
        let path = destination.claim(None)?;
        let content = request.into_body().into_data_stream();
        vec![write(path, destination.user.clone(), encoding, content).await?]
    };
    Ok(Json(written).into_response())
}

fn encoding(headers: &HeaderMap) -> Result<Encoding, HttpError> {
    match headers.get(CONTENT_ENCODING).map(|value| value.as_bytes()) {
        None | Some(b"" | b"identity") => Ok(Encoding::Identity),
        Some(b"gzip") => Ok(Encoding::Gzip),
        Some(_) => Err(HttpError::bad_request(
            "unsupported content encoding: identity and gzip are known".into(),
        )),
    }
}

/// Where the parts of one request go.
struct Destination {
    agent: Arc<Agent>,
    user: User,
    default_path: String,
    seen: HashSet<PathBuf>,
}

impl Destination {
    /// The path of the next file: that of the query, else the part's own name, which may hold slashes.
    fn claim(&mut self, file_name: Option<&str>) -> Result<PathBuf, HttpError> {
        let named = if self.default_path.is_empty() {
            file_name.unwrap_or_default()
        } else {
            &self.default_path
        };
        if named.is_empty() {
            return Err(HttpError::bad_request(
                "a file needs a path: in the query, or as the part's file name".into(),
            ));
        }
        let path = environment::resolve(
            named,
            &self.user,
            self.agent.settings().default_workdir.as_deref(),
        );
        if !self.seen.insert(path.clone()) {
            return Err(HttpError::bad_request(format!(
                "{}: named twice in one request",
                path.display()
            )));
        }
        Ok(path)
    }
}

async fn upload_form(
    request: Request,
    destination: &mut Destination,
    encoding: Encoding,
) -> Result<Vec<Written>, HttpError> {
    let broken =
        |error: &dyn std::fmt::Display| HttpError::bad_request(format!("malformed form: {error}"));
    let mut form = Multipart::from_request(request, &())
        .await
        .map_err(|error| broken(&error))?;
    let mut written = Vec::new();
    while let Some(part) = form.next_field().await.map_err(|error| broken(&error))? {
        if part.name() != Some("file") {
            continue;
        }
        let path = destination.claim(part.file_name())?;
        written.push(write(path, destination.user.clone(), encoding, part).await?);
    }
    if written.is_empty() {
        return Err(HttpError::bad_request(
            "the form has no part named 'file'".into(),
        ));
    }
    Ok(written)
}

async fn write<E: std::fmt::Display>(
    path: PathBuf,
    user: User,
    encoding: Encoding,
    mut content: impl Stream<Item = Result<Bytes, E>> + Unpin,
) -> Result<Written, HttpError> {
    let name = path.display().to_string();
    let failed = |error: &std::io::Error| HttpError::file(&name, error);
    let mut writer = Writer::create(path.clone(), user, encoding);
    while let Some(chunk) = content.next().await {
        let chunk = chunk.map_err(|error| {
            HttpError::bad_request(format!("{name}: the upload broke off: {error}"))
        })?;
        if !writer.write(chunk).await {
            break;
        }
    }
    writer.finish().await.map_err(|error| failed(&error))?;
    let file_name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    Ok(Written {
        name: file_name.unwrap_or_default(),
        path: name,
        r#type: "file",
    })
}
