//! blockd: opens stacks of layers as images and exports each as a file of its own FUSE mount.
//!
//! The API is docs/protocols/blockd.md, the file format docs/formats/lsmt.md. From the bottom up:
//!
//! * `format`: layout and arithmetic, no I/O; `backend`: files, replaceable in tests.
//! * `content`: what is in a file, out of its tar and zfile wrappings.
//! * `layer`: sealed layers and stacks, and how they are made; `memory`: layers of guest memory.
//! * `image`: disks and memory files, and the table of what is open.
//! * `export`: the file system and its mount; `server`: HTTP on a unix socket.
//! * `main`, `process`: start and end.

mod backend;
mod content;
mod error;
mod export;
mod format;
mod image;
mod layer;
mod logger;
mod memory;
mod metrics;
mod pool;
mod process;
mod server;
#[cfg(test)]
mod testing;
mod uuid;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use crate::backend::HostFiles;
use crate::error::{Context, Error, Result};
use crate::export::mount::Mount;
use crate::export::nodes::Exports;
use crate::image::table::Images;
use crate::layer::sealed::LayerStore;
use crate::pool::Pool;
use crate::server::api::Api;

const USAGE: &str = "usage: blockd --socket PATH --mount DIR --uid N [--log PATH]";
/// For flushes, write-outs and what waits on a seal; a disk uses one of them at a time.
const POOL_THREADS: usize = 16;

/// Exit statuses, as in sysexits.h.
const EXIT_USAGE: u8 = 64;
/// The host lacks FUSE, or the right to mount.
const EXIT_UNAVAILABLE: u8 = 69;
const EXIT_FAILURE: u8 = 1;

struct Arguments {
    socket: PathBuf,
    mount: PathBuf,
    uid: u32,
    log: Option<PathBuf>,
}

fn main() -> ExitCode {
    let Some(arguments) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(EXIT_USAGE);
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err((status, error)) => {
            let hint = if error.hint.is_empty() {
                String::new()
            } else {
                format!(" ({})", error.hint)
            };
            eprintln!("blockd: {error}{hint}");
            ExitCode::from(status)
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Option<Arguments> {
    let (mut socket, mut mount, mut uid, mut log) = (None, None, None, None);
    while let Some(word) = words.next() {
        let value = words.next()?;
        match word.as_str() {
            "--socket" => socket = Some(value.into()),
            "--mount" => mount = Some(value.into()),
            "--uid" => uid = Some(value.parse().ok()?),
            "--log" => log = Some(value.into()),
            _ => return None,
        }
    }
    Some(Arguments {
        socket: socket?,
        mount: mount?,
        uid: uid?,
        log,
    })
}

fn run(arguments: &Arguments) -> std::result::Result<(), (u8, Error)> {
    let failure = |error| (EXIT_FAILURE, error);
    logger::start(arguments.log.as_deref()).map_err(failure)?;
    process::hold_signals();
    process::raise_descriptor_limit();
    refuse_second(&arguments.socket).map_err(failure)?;
    let (mount, device) =
        export::mount::mount(&arguments.mount).map_err(|error| (EXIT_UNAVAILABLE, error))?;
    serve(arguments, mount, device).map_err(failure)
}

/// From the mount to the end of the daemon.
fn serve(arguments: &Arguments, mount: Mount, device: OwnedFd) -> Result<()> {
    let listener = bind(&arguments.socket)?;
    process::drop_privileges(arguments.uid).context(|| format!("become uid {}", arguments.uid))?;

    let files = HostFiles::new(Some(mount.device)).context(|| "read the boot id".into())?;
    let pool = Arc::new(Pool::new(POOL_THREADS).context(|| "start threads".into())?);
    let exports = Exports::new();
    let session =
        start_session(device, exports.clone()).context(|| "start the FUSE session".into())?;
    let store = LayerStore::new(Arc::new(files));
    let images = Images::new(store, exports, pool, arguments.mount.clone());
    let api = Arc::new(Api {
        images,
        shutdown: process::ask_to_end,
    });
    let served = api.clone();
    std::thread::Builder::new()
        .name("http".into())
        .spawn(move || {
            let Err(error) = server::listen::serve(listener, served);
            log::error!("serve: {error}");
            process::ask_to_end();
        })
        .context(|| "start a thread".into())?;
    log::info!("ready, version {}", env!("CARGO_PKG_VERSION"));
    println!("ready");
    // Whoever started us may be gone already.
    let _ = std::io::stdout().flush();

    process::wait_for_end();
    log::info!("ending");
    api.images.close_all();
    // The socket's directory is not ours to write in; a socket nobody listens on is removed by the
    // next start.
    let _ = std::fs::remove_file(&arguments.socket);
    drop(mount);
    drop(session);
    log::info!("ended");
    Ok(())
}

fn start_session(
    device: OwnedFd,
    exports: Arc<Exports>,
) -> std::io::Result<fuser::BackgroundSession> {
    let cpus = std::thread::available_parallelism().map_or(2, usize::from);
    let mut config = fuser::Config::default();
    // Reads of cold layers block their thread, so more than there are CPUs.
    config.n_threads = Some((2 * cpus).clamp(4, 32));
    config.acl = fuser::SessionACL::All;
    fuser::Session::from_fd(
        export::fuse::FileSystem::new(exports),
        device,
        fuser::SessionACL::All,
        config,
    )?
    .spawn()
}

/// Two daemons on one mount would unmount each other.
fn refuse_second(socket: &Path) -> Result<()> {
    match UnixStream::connect(socket) {
        Ok(_) => Err(Error::conflict(format!(
            "a blockd already serves on {}",
            socket.display()
        ))),
        Err(_) => Ok(()),
    }
}

/// Binds the socket, replacing one that nobody listens on.
fn bind(socket: &Path) -> Result<UnixListener> {
    let what = || format!("bind {}", socket.display());
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::io(what(), &error));
        }
        _ => {}
    }
    // SAFETY: changes only the mode of files this process makes; no other thread exists yet.
    let mask = unsafe { libc::umask(0o177) };
    let bound = UnixListener::bind(socket);
    // SAFETY: as above.
    unsafe { libc::umask(mask) };
    bound.context(what)
}
