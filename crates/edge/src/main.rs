//! edge, the front door of AgentENV: a reverse proxy with the only public port of a node.
//!
//! It decides by host label or headers which sandbox a request is for, and passes everything else to the control plane. Who is where it is told over
//! its admin socket (docs/protocols/edge.md); it holds no other state, outlives the server that started it, and never waits for it while serving sandboxes.

#![forbid(unsafe_code)]

mod admin;
mod answer_body;
mod answers;
mod args;
mod client_io;
mod destination;
mod guard;
mod headers;
mod listener;
mod log;
mod metrics;
mod proxy;
mod routes;
mod tunnel;
mod upstream;
mod upstream_io;

use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixStream, lookup_host};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::{interval, sleep, timeout};

use crate::admin::Admin;
use crate::args::{Args, USAGE};
use crate::listener::{Listener, Stop};
use crate::proxy::Proxy;
use crate::routes::RouteTable;

const BACKLOG: u32 = 4096;
const MOST_CONNECTIONS: usize = 16_384;
/// Descriptors for sockets of edge's own, and for refusals.
const RESERVED_DESCRIPTORS: usize = 512;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// What a cut takes to reach the kernel.
const CUT_TIME: Duration = Duration::from_millis(100);
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args_os().skip(1)) {
        Ok(args) => args,
        Err(message) => {
            eprint!("edge: {message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    match runtime
        .map_err(|error| format!("cannot start: {error}"))
        .and_then(|runtime| runtime.block_on(run(args)))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("edge: {message}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), String> {
    log::open(args.log.as_deref()).map_err(|error| format!("cannot write the log: {error}"))?;
    let (mut terminate, _hangup) =
        signals().map_err(|error| format!("cannot handle signals: {error}"))?;
    let connections = connection_limit(args.max_connections);
    let socket = listen(&args.listen)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", args.listen))?;
    let listen = socket
        .local_addr()
        .map_err(|error| error.to_string())?
        .to_string();
    let admin_socket = listen_admin(&args.admin)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", args.admin.display()))?;
    if let Some(uid) = args.uid {
        become_user(uid).map_err(|error| format!("cannot become user {uid}: {error}"))?;
    }

    let routes = Arc::new(RouteTable::default());
    let stop = Stop::default();
    let slots = Arc::new(Semaphore::new(connections));
    let proxy = Arc::new(Proxy::new(Arc::clone(&routes), &args.control, args.domains));
    tokio::spawn(
        Admin {
            routes: Arc::clone(&routes),
            listen: listen.clone(),
            stopping: stop.stopping.clone(),
        }
        .run(admin_socket),
    );
    tokio::spawn(sweep(routes));
    // The starter may be gone already.
    let _ = writeln!(std::io::stdout(), "ready {listen}");

    let serving = Listener {
        socket,
        proxy,
        connections: Arc::clone(&slots),
        stop: stop.clone(),
    }
    .run();
    tokio::select! {
        () = serving => {}
        _ = terminate.recv() => stop.stopping.cancel(),
    }
    // Every connection has given its slot back: nothing is left to finish.
    let idle = slots.acquire_many(u32::try_from(connections).unwrap_or(u32::MAX));
    let drained = timeout(DRAIN_TIMEOUT, idle).await.is_ok();
    if !drained {
        stop.abandon.cancel();
        sleep(CUT_TIME).await;
    }
    let _ = std::fs::remove_file(&args.admin);
    Ok(())
}

/// SIGTERM ends; SIGHUP, which a closing terminal sends, does nothing.
fn signals() -> std::io::Result<(tokio::signal::unix::Signal, tokio::signal::unix::Signal)> {
    Ok((
        signal(SignalKind::terminate())?,
        signal(SignalKind::hangup())?,
    ))
}

/// Raises the limit on descriptors as far as it goes; each client may need two.
fn connection_limit(wanted: usize) -> usize {
    let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, hard)| {
        let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
        if raised { hard } else { soft }
    });
    let possible = usize::try_from(descriptors)
        .unwrap_or(usize::MAX)
        .saturating_sub(RESERVED_DESCRIPTORS)
        / 2;
    possible
        .min(if wanted == 0 {
            MOST_CONNECTIONS
        } else {
            wanted
        })
        .max(1)
}

async fn listen(address: &str) -> std::io::Result<TcpListener> {
    let resolved = lookup_host(address).await?.next();
    let address: SocketAddr =
        resolved.ok_or_else(|| std::io::Error::other("the host has no address"))?;
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Takes the place of a dead edge's socket, never of a living one's.
async fn listen_admin(path: &Path) -> std::io::Result<UnixListener> {
    if UnixStream::connect(path).await.is_ok() {
        return Err(std::io::Error::other("another edge answers there"));
    }
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let staged = path.with_extension(format!("{}", std::process::id()));
    let listener = UnixListener::bind(&staged)?;
    // Only whole and private does it get its name.
    std::fs::set_permissions(&staged, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&staged, path)?;
    Ok(listener)
}

fn become_user(uid: u32) -> nix::Result<()> {
    setgroups(&[])?;
    setgid(Gid::from_raw(uid))?;
    setuid(Uid::from_raw(uid))
}

async fn sweep(routes: Arc<RouteTable>) {
    let mut ticks = interval(SWEEP_INTERVAL);
    loop {
        ticks.tick().await;
        routes.sweep();
    }
}
