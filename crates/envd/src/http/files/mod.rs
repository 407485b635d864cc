//! `GET` and `POST /files`: whole files, streamed at constant memory.

mod download;
mod upload;

use std::sync::Arc;

use serde::Deserialize;

use super::error::HttpError;
use crate::state::{Agent, blocking};
use crate::users::User;

pub use download::download;
pub use upload::upload;

#[derive(Deserialize)]
pub struct Parameters {
    #[serde(default)]
    path: String,
    username: Option<String>,
    signature: Option<String>,
}

async fn user(agent: &Arc<Agent>, name: Option<String>) -> Result<User, HttpError> {
    let agent = agent.clone();
    let found = blocking(move || agent.user(name.as_deref())).await?;
    found.map_err(|name| HttpError::unauthorized(format!("invalid username: '{name}'")))
}
