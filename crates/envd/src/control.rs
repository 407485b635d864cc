//! The node's control calls, docs/protocols/envd.md. To programs in the sandbox they do not exist.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use buffa_types::google::protobuf::Timestamp;
use serde::{Deserialize, Serialize};

use crate::http::error::HttpError;
use crate::http::not_found;
use crate::log;
use crate::machine::Machine;
use crate::state::{Agent, blocking};

const ENTROPY_MIN_BYTES: usize = 32;

/// `POST /init`. An absent field leaves things as they are; unknown ones are ignored.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Init {
    access_token: Option<String>,
    env_vars: Option<std::collections::BTreeMap<String, String>>,
    timestamp: Option<Timestamp>,
    entropy: Option<String>,
    hostname: Option<String>,
    machine_id: Option<String>,
    dns_servers: Option<Vec<IpAddr>>,
    default_user: Option<String>,
    default_workdir: Option<String>,
    sandbox_id: Option<String>,
    template_id: Option<String>,
    #[serde(rename = "lifecycleID")]
    lifecycle_id: Option<String>,
    thaw: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Freeze {
    timeout_ms: u64,
}

#[derive(Serialize)]
struct Frozen {
    frozen: bool,
    reason: String,
}

/// Whom a listener serves these calls to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Control {
    Everybody,
    /// Callers with an address that is not this machine's own.
    Outsiders,
    Nobody,
}

pub fn routes(control: Control) -> Router<Arc<Agent>> {
    let routes = Router::new()
        .route("/init", post(init))
        .route("/freeze", post(freeze))
        .route("/unfreeze", post(unfreeze));
    match control {
        Control::Everybody => routes,
        Control::Outsiders => routes.layer(from_fn(only_outsiders)),
        Control::Nobody => Router::new(),
    }
}

async fn only_outsiders(
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    // The kernel binds a socket to an address just when it is one of this machine's.
    if peer.ip().is_loopback() || UdpSocket::bind((peer.ip(), 0)).is_ok() {
        return not_found(request).await.into_response();
    }
    next.run(request).await
}

/// The body is read whatever its content type says: it is the node's.
fn parse<T: for<'a> Deserialize<'a>>(body: &[u8]) -> Result<T, HttpError> {
    serde_json::from_slice(body)
        .map_err(|error| HttpError::bad_request(format!("malformed request: {error}")))
}

async fn init(State(agent): State<Arc<Agent>>, body: Bytes) -> Result<StatusCode, HttpError> {
    let init: Init = if body.is_empty() {
        Init::default()
    } else {
        parse(&body)?
    };
    let entropy = init.entropy.as_deref().map(decode_entropy).transpose()?;
    let thaw = init.thaw;
    remember(&agent, &init);
    let changing = agent.clone();
    blocking(move || match &changing.machine {
        Some(machine) => change(machine, &changing, &init, entropy.as_deref()),
        None => Ok(()),
    })
    .await??;
    if thaw {
        agent.cgroups.thaw().await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

fn decode_entropy(text: &str) -> Result<Vec<u8>, HttpError> {
    let bytes = BASE64
        .decode(text)
        .map_err(|error| HttpError::bad_request(format!("entropy: {error}")))?;
    if bytes.len() < ENTROPY_MIN_BYTES {
        return Err(HttpError::bad_request(format!(
            "entropy: {} bytes, at least 32 are needed",
            bytes.len()
        )));
    }
    Ok(bytes)
}

fn remember(agent: &Agent, init: &Init) {
    let mut settings = agent.settings();
    if let Some(token) = &init.access_token {
        settings.access_token = Some(token.clone()).filter(|token| !token.is_empty());
    }
    if let Some(variables) = &init.env_vars {
        settings.variables.clone_from(variables);
    }
    for (name, value) in [
        ("E2B_SANDBOX_ID", &init.sandbox_id),
        ("E2B_TEMPLATE_ID", &init.template_id),
    ] {
        if let Some(value) = value {
            settings.identity.insert(name.to_owned(), value.clone());
        }
    }
    if let Some(user) = &init.default_user {
        settings.default_user = Some(user.clone()).filter(|user| !user.is_empty());
    }
    if let Some(workdir) = &init.default_workdir {
        settings.default_workdir = Some(workdir.clone()).filter(|workdir| !workdir.is_empty());
    }
    if let Some(id) = &init.lifecycle_id
        && settings.lifecycle_id != *id
    {
        settings.lifecycle_id.clone_from(id);
        drop(settings);
        // Another life: whoever was connected in the last one is not there any more, and must hold up nobody's output.
        agent.processes.cut_streams();
    }
}

/// The clock and the random numbers must be right, or two sandboxes would share a state: their failure is the call's. An image
/// whose /etc cannot be written, or says otherwise, is no reason to refuse it.
fn change(
    machine: &Machine,
    agent: &Agent,
    init: &Init,
    entropy: Option<&[u8]>,
) -> Result<(), HttpError> {
    if let Some(bytes) = entropy {
        machine
            .add_entropy(bytes)
            .map_err(|error| HttpError::internal(format!("entropy: {error}")))?;
    }
    if let Some(timestamp) = &init.timestamp {
        let seconds = u64::try_from(timestamp.seconds);
        let seconds =
            seconds.map_err(|_| HttpError::bad_request("timestamp: before 1970".into()))?;
        let wall_clock = Duration::new(seconds, timestamp.nanos.unsigned_abs());
        machine
            .set_clock(wall_clock)
            .map_err(|error| HttpError::internal(format!("clock: {error}")))?;
    }
    let identity = agent.settings().identity.clone();
    let files = [
        (
            "hostname",
            init.hostname
                .as_deref()
                .map(|name| machine.set_hostname(name)),
        ),
        (
            "machineId",
            init.machine_id
                .as_deref()
                .map(|id| machine.set_machine_id(id)),
        ),
        (
            "dnsServers",
            init.dns_servers
                .as_deref()
                .map(|servers| machine.set_dns_servers(servers)),
        ),
        ("sandboxId", Some(machine.set_identity(&identity))),
    ];
    for (field, outcome) in files {
        match outcome {
            Some(Err(error)) if error.kind() == std::io::ErrorKind::InvalidInput => {
                return Err(HttpError::bad_request(format!("{field}: {error}")));
            }
            Some(Err(error)) => log::write(format_args!("init: {field}: {error}")),
            _ => {}
        }
    }
    Ok(())
}

/// Half of the time at most goes to writing out file systems, what is left to stopping processes.
async fn freeze(State(agent): State<Arc<Agent>>, body: Bytes) -> Result<Response, HttpError> {
    let within = Duration::from_millis(parse::<Freeze>(&body)?.timeout_ms);
    let started = Instant::now();
    let synced = tokio::time::timeout(within / 2, blocking(rustix::fs::sync))
        .await
        .is_ok();
    let answer = match agent
        .cgroups
        .freeze(within.saturating_sub(started.elapsed()))
        .await
    {
        Ok(()) if synced => Frozen {
            frozen: true,
            reason: String::new(),
        },
        Ok(()) => Frozen {
            frozen: true,
            reason: "file systems were still being written out".into(),
        },
        Err(reason) => Frozen {
            frozen: false,
            reason,
        },
    };
    Ok(Json(answer).into_response())
}

async fn unfreeze(State(agent): State<Arc<Agent>>) -> Result<StatusCode, HttpError> {
    agent.cgroups.thaw().await?;
    Ok(StatusCode::NO_CONTENT)
}
