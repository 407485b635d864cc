//! From a request to a running process, and the tasks that see it through to its end.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use connectrpc::ConnectError;
use rustix::process::Signal;
use tokio::sync::mpsc::Receiver;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::channel::{Channel, terminal};
use super::output::{End, Event, Exit, Source};
use super::spawn::{Failure, Program};
use super::table::{Child, Input, Process, Table};
use crate::environment;
use crate::proto::process::ProcessConfig;
use crate::state::{Agent, blocking};
use crate::users::User;

const PIPE_CHUNK: usize = 32 << 10;
const TERMINAL_CHUNK: usize = 16 << 10;
/// What a pipe holds: a process's own last words are at most that much behind its exit.
const PIPE_CAPACITY: usize = 64 << 10;
/// Once a process has ended, a descendant that keeps its output open is listened to until it is silent for this long …
const SILENCE: Duration = Duration::from_millis(100);
/// … and, if it never is, for this long in all.
const AFTERMATH: Duration = Duration::from_secs(1);

pub struct Request {
    pub config: ProcessConfig,
    pub user: Option<String>,
    pub tag: Option<String>,
    /// Columns and rows of a terminal, where one is wanted.
    pub terminal: Option<(u16, u16)>,
    pub stdin: bool,
    /// When the whole process group is killed.
    pub deadline: Option<Instant>,
}

/// The agent's ends of a process's streams.
struct Ends {
    input: Option<OwnedFd>,
    outputs: Vec<(Source, OwnedFd)>,
}

/// Starts the process; the receiver sees all of its output. Run it as a task of its own: dropped half-way, it would leave a
/// process nobody knows.
///
/// Errors: `unauthenticated` for an unknown user, `invalid_argument` for what can never start, `resource_exhausted` when the
/// machine has no room for another process.
pub async fn launch(
    agent: Arc<Agent>,
    request: Request,
) -> Result<(u32, Receiver<Event>), ConnectError> {
    let Request {
        config,
        user,
        tag,
        terminal,
        stdin,
        deadline,
    } = request;
    let command = config.cmd.clone();
    let preparing = agent.clone();
    let (config, child, ends) = blocking(move || {
        let (program, ends) = prepare(&preparing, &config, user.as_deref(), terminal, stdin)?;
        let child = preparing
            .processes
            .spawn(&program, preparing.cgroups.starting_points())
            .map_err(cannot_clone)?;
        Ok::<_, ConnectError>((config, child, ends))
    })
    .await
    .map_err(internal)??;

    let Child {
        pid,
        outcome,
        mut exit,
    } = child;
    executed(&agent.processes, pid, outcome, deadline, &command).await?;
    let (input, outputs) = channels(ends, terminal.is_some()).map_err(|error| {
        agent.processes.signal(pid, Signal::KILL);
        internal(error)
    })?;
    let process = Arc::new(Process::new(pid, config, tag, input));
    let events = process.output.listen();
    agent.processes.add(process.clone());
    let table = agent.processes.clone();
    tokio::spawn(async move { see_through(table, process, &mut exit, outputs, deadline).await });
    Ok((pid, events))
}

fn internal(error: io::Error) -> ConnectError {
    ConnectError::internal(error.to_string())
}

fn cannot_clone(error: io::Error) -> ConnectError {
    ConnectError::resource_exhausted(format!("cannot start a process: {error}"))
}

fn prepare(
    agent: &Agent,
    config: &ProcessConfig,
    user: Option<&str>,
    size: Option<(u16, u16)>,
    stdin: bool,
) -> Result<(Program, Ends), ConnectError> {
    let user = agent
        .user(user)
        .map_err(|name| ConnectError::unauthenticated(format!("invalid username: '{name}'")))?;
    let (variables, default_workdir) = {
        let settings = agent.settings();
        (settings.environment(), settings.default_workdir.clone())
    };
    let directory = working_directory(
        config.cwd.as_deref().unwrap_or_default(),
        &user,
        default_workdir.as_deref(),
    )?;
    let variables = environment::variables(
        &user,
        &variables,
        config
            .envs
            .iter()
            .map(|(name, value)| (name.clone(), value.clone())),
    );
    let path = variables
        .get("PATH")
        .map(String::as_str)
        .unwrap_or_default();
    let candidates = candidates(&config.cmd, path);
    let (stdio, ends) = streams(size, stdin, user.uid).map_err(internal)?;
    let strings = |values: Vec<Vec<u8>>| {
        values
            .into_iter()
            .map(c_string)
            .collect::<Result<Vec<_>, _>>()
    };
    let arguments = std::iter::once(&config.cmd)
        .chain(&config.args)
        .map(|word| word.clone().into_bytes())
        .collect();
    let environment = variables
        .iter()
        .map(|(name, value)| format!("{name}={value}").into_bytes())
        .collect();
    let program = Program {
        candidates: strings(candidates)?,
        arguments: strings(arguments)?,
        environment: strings(environment)?,
        directory: c_string(directory.as_os_str().as_bytes().to_vec())?,
        uid: user.uid,
        gid: user.gid,
        groups: user.groups,
        stdio,
        terminal: size.is_some(),
    };
    Ok((program, ends))
}

fn c_string(bytes: Vec<u8>) -> Result<CString, ConnectError> {
    CString::new(bytes).map_err(|_| {
        ConnectError::invalid_argument("a NUL byte in the command, its arguments, variables or cwd")
    })
}

/// A home that does not exist is no reason to fail for those who did not ask for it.
fn working_directory(
    asked: &str,
    user: &User,
    default: Option<&str>,
) -> Result<PathBuf, ConnectError> {
    let directory = environment::resolve(asked, user, default);
    if directory.is_dir() {
        return Ok(directory);
    }
    if asked.is_empty() && default.is_none() {
        return Ok("/".into());
    }
    Err(ConnectError::invalid_argument(format!(
        "cwd '{}' does not exist",
        directory.display()
    )))
}

/// A command with a slash is a path; another is looked for along PATH.
fn candidates(command: &str, path: &str) -> Vec<Vec<u8>> {
    if command.contains('/') || command.is_empty() {
        return vec![command.as_bytes().to_vec()];
    }
    let directories = path.split(':').filter(|directory| !directory.is_empty());
    directories
        .map(|directory| {
            Path::new(directory)
                .join(OsStr::new(command))
                .as_os_str()
                .as_bytes()
                .to_vec()
        })
        .collect()
}

fn streams(size: Option<(u16, u16)>, stdin: bool, uid: u32) -> io::Result<([OwnedFd; 3], Ends)> {
    if let Some((columns, rows)) = size {
        let (master, slave) = terminal(columns, rows, uid)?;
        let stdio = [slave.try_clone()?, slave.try_clone()?, slave];
        return Ok((
            stdio,
            Ends {
                input: None,
                outputs: vec![(Source::Terminal, master)],
            },
        ));
    }
    let (child_in, input) = if stdin {
        let (reader, writer) = io::pipe()?;
        (reader.into(), Some(writer.into()))
    } else {
        (File::open("/dev/null")?.into(), None)
    };
    let (stdout, child_out) = io::pipe()?;
    let (stderr, child_err) = io::pipe()?;
    let outputs = vec![
        (Source::Stdout, stdout.into()),
        (Source::Stderr, stderr.into()),
    ];
    Ok((
        [child_in, child_out.into(), child_err.into()],
        Ends { input, outputs },
    ))
}

fn channels(ends: Ends, is_terminal: bool) -> io::Result<(Input, Vec<(Source, Arc<Channel>)>)> {
    let mut outputs = Vec::new();
    for (source, fd) in ends.outputs {
        outputs.push((source, Arc::new(Channel::new(fd)?)));
    }
    let input = match ends.input {
        Some(fd) => Input::Pipe(tokio::sync::Mutex::new(Some(Channel::new(fd)?))),
        None if is_terminal => Input::Terminal(outputs[0].1.clone()),
        None => Input::None,
    };
    Ok((input, outputs))
}

/// Waits for the exec, which a frozen sandbox delays until it is thawed. On failure the child is gone, or dies on its own.
async fn executed(
    table: &Table,
    pid: u32,
    outcome: OwnedFd,
    deadline: Option<Instant>,
    command: &str,
) -> Result<(), ConnectError> {
    let outcome = Channel::new(outcome).map_err(internal)?;
    let mut report = [0; Failure::LENGTH];
    let read = tokio::select! {
        read = outcome.read(&mut report) => read.map_err(internal)?,
        () = at(deadline) => {
            table.signal(pid, Signal::KILL);
            return Err(deadline_exceeded());
        }
    };
    if read < Failure::LENGTH {
        return Ok(());
    }
    let failure = Failure::parse(report);
    let message = failure.describe(command);
    Err(if failure.is_callers() {
        ConnectError::invalid_argument(message)
    } else {
        ConnectError::internal(message)
    })
}

pub fn deadline_exceeded() -> ConnectError {
    ConnectError::deadline_exceeded(
        "the deadline of the command passed; its process group was killed",
    )
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Until the process has ended, by itself or at its deadline, and all it wrote has been handed out.
async fn see_through(
    table: Table,
    process: Arc<Process>,
    exit: &mut oneshot::Receiver<Exit>,
    outputs: Vec<(Source, Arc<Channel>)>,
    deadline: Option<Instant>,
) {
    let (exited, ended) = watch::channel(None);
    let readers: Vec<_> = outputs
        .into_iter()
        .map(|(source, channel)| {
            tokio::spawn(relay(process.clone(), source, channel, ended.clone()))
        })
        .collect();
    let mut timed_out = false;
    let exit = loop {
        tokio::select! {
            exit = &mut *exit => break exit.unwrap_or(Exit::Signal(Signal::KILL.as_raw())),
            () = at(deadline), if !timed_out => {
                timed_out = true;
                table.signal(process.pid, Signal::KILL);
            }
        }
    };
    process.set_exited();
    exited.send_replace(Some(Instant::now()));
    for reader in readers {
        let _ = reader.await;
    }
    let end = End { exit, timed_out };
    process.output.publish(Event::End(end.clone())).await;
    table.retire(&process, end);
}

/// Publishes what the process writes. Returns at the end of the stream, or after the process's when only a descendant still
/// holds it open; what that one writes later is read and dropped.
async fn relay(
    process: Arc<Process>,
    source: Source,
    channel: Arc<Channel>,
    mut ended: watch::Receiver<Option<Instant>>,
) {
    let size = if source == Source::Terminal {
        TERMINAL_CHUNK
    } else {
        PIPE_CHUNK
    };
    let mut buffer = vec![0; size];
    let mut since_end = 0;
    loop {
        let silence = async {
            // The sender outlives its readers, so this waits for the end indeed.
            let _ = ended.wait_for(Option::is_some).await;
            tokio::time::sleep(SILENCE).await;
        };
        let read = tokio::select! {
            biased;
            read = channel.read(&mut buffer) => read,
            () = silence => break,
        };
        let length = match read {
            Ok(0) | Err(_) => return,
            Ok(length) => length,
        };
        process
            .output
            .publish(Event::Data(
                source,
                Bytes::copy_from_slice(&buffer[..length]),
            ))
            .await;
        if let Some(end) = *ended.borrow() {
            since_end += length;
            if since_end > PIPE_CAPACITY && end.elapsed() > AFTERMATH {
                break;
            }
        }
    }
    tokio::spawn(async move { while matches!(channel.read(&mut buffer).await, Ok(1..)) {} });
}

/// Writes `data` to a process's standard input or terminal.
///
/// Errors: `internal` when it has none or closed it, `failed_precondition` when it has the other kind.
pub async fn send(process: &Process, to_terminal: bool, data: &[u8]) -> Result<(), ConnectError> {
    let written = match &process.input {
        Input::None => {
            return Err(ConnectError::internal(
                "stdin is not enabled for this process",
            ));
        }
        Input::Pipe(_) if to_terminal => {
            return Err(ConnectError::failed_precondition(
                "the process has no terminal",
            ));
        }
        Input::Terminal(_) if !to_terminal => {
            return Err(ConnectError::failed_precondition(
                "the process has a terminal: send pty input",
            ));
        }
        Input::Pipe(pipe) => match &*pipe.lock().await {
            Some(pipe) => pipe.write_all(data).await,
            None => return Err(ConnectError::internal("stdin is closed")),
        },
        Input::Terminal(terminal) => terminal.write_all(data).await,
    };
    written.map_err(|error| ConnectError::internal(format!("cannot write to the process: {error}")))
}

/// Longest wait for writes in progress when standard input is to be closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);

/// Closes standard input, after what was sent before. Idempotent.
pub async fn close_stdin(process: &Process) -> Result<(), ConnectError> {
    match &process.input {
        Input::None => Ok(()),
        Input::Terminal(_) => Err(ConnectError::failed_precondition(
            "a terminal cannot be closed: send it an end-of-file (^D)",
        )),
        Input::Pipe(pipe) => {
            let waited = timeout(CLOSE_PATIENCE, pipe.lock()).await;
            let mut pipe = waited.map_err(|_| {
                ConnectError::unavailable("the process does not read what was sent to it before")
            })?;
            *pipe = None;
            Ok(())
        }
    }
}
