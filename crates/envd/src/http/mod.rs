//! The HTTP surface: routes, who may call them, and the plain (not Connect) endpoints.

pub mod auth;
mod cors;
pub mod error;
mod files;
mod linger;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::handler::Handler;
use axum::http::StatusCode;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::{any, get, post};
use axum::serve::ListenerExt;
use axum::{Json, Router};
use connectrpc::{ConnectRpcService, Limits};

use crate::control::Control;
use crate::filesystem::Filesystem;
use crate::metrics;
use crate::process::Processes;
use crate::proto::{filesystem::FilesystemExt, process::ProcessExt};
use crate::state::{Agent, blocking};
use error::HttpError;

/// Largest message of the RPCs: a client may send that much standard input at once.
const MESSAGE_MAX_BYTES: usize = 64 << 20;
/// How long sent data may stay unacknowledged before the connection counts as dead. A sandbox that was stopped for longer wakes
/// up with such connections.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// All routes; those of the node only for whom `control` allows.
pub fn router(agent: Arc<Agent>, control: Control) -> Router {
    let rpc = connectrpc::Router::new();
    let rpc = Arc::new(Processes(agent.clone())).register(rpc);
    let rpc = Arc::new(Filesystem(agent.clone())).register(rpc);
    let limits = Limits::default()
        .with_max_message_size(MESSAGE_MAX_BYTES)
        .with_max_request_body_size(MESSAGE_MAX_BYTES);
    let rpc = ConnectRpcService::new(rpc).with_limits(limits);
    let open = Router::new()
        .route("/health", get(StatusCode::NO_CONTENT))
        .route(
            "/files",
            get(files::download).post(files::upload.layer(from_fn(linger::drain_refused))),
        )
        .layer(DefaultBodyLimit::disable());
    let demanding_token = Router::new()
        .route("/metrics", get(report))
        .route("/envs", get(variables))
        .route("/files/compose", post(compose))
        .route_service("/process.Process/{method}", rpc.clone())
        .route_service("/filesystem.Filesystem/{method}", rpc)
        .layer(from_fn_with_state(agent.clone(), auth::demand_token));
    open.merge(demanding_token)
        .merge(crate::control::routes(control))
        .fallback(any(not_found))
        .layer(from_fn(cors::allow))
        .with_state(agent)
}

/// Serves until the listener fails for good.
pub async fn serve(listener: std::net::TcpListener, router: Router) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?.tap_io(|connection| {
        // Neither failing is worth refusing the connection.
        let _ = connection.set_nodelay(true);
        let timeout_ms = UNACKNOWLEDGED.as_millis() as u32;
        let _ = rustix::net::sockopt::set_tcp_user_timeout(&*connection, timeout_ms);
    });
    axum::serve(
        listener,
        router.into_make_service_with_connect_info::<SocketAddr>(),
    )
    .await
}

async fn report(State(agent): State<Arc<Agent>>) -> Result<Json<metrics::Report>, HttpError> {
    let lifecycle_id = agent.settings().lifecycle_id.clone();
    Ok(Json(
        blocking(move || agent.metrics.report(lifecycle_id)).await?,
    ))
}

async fn variables(State(agent): State<Arc<Agent>>) -> impl IntoResponse {
    Json(agent.settings().environment())
}

async fn compose() -> HttpError {
    HttpError::unimplemented("composing files is not supported")
}

pub async fn not_found(request: Request) -> HttpError {
    HttpError::new(
        StatusCode::NOT_FOUND,
        format!("no such endpoint: {}", request.uri().path()),
    )
}
