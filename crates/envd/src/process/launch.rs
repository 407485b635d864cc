//! From a request to a running process.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use connectrpc::ConnectError;
use rustix::process::Signal;
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, sleep_until};

use super::channel::{Channel, terminal};
use super::input::Input;
use super::output::{Event, Source};
use super::spawn::{Failure, Program};
use super::supervise::{self, Outputs};
use super::table::{Child, Process, Table};
use crate::cgroup::Group;
use crate::environment;
use crate::proto::process::ProcessConfig;
use crate::state::{Agent, blocking};
use crate::users::User;

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

/// A clone on its way to its program.
struct Starting {
    config: ProcessConfig,
    child: Child,
    ends: Ends,
    group: Option<Group>,
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
    let cloning = agent.clone();
    let started = blocking(move || {
        let (program, ends) = prepare(&cloning, &config, user.as_deref(), terminal, stdin)?;
        let group = cloning.cgroups.group().map_err(cannot_clone)?;
        match cloning
            .processes
            .spawn(&program, group.as_ref().map(Group::as_fd))
        {
            Ok(child) => Ok(Starting {
                config,
                child,
                ends,
                group,
            }),
            Err(error) => {
                cloning.cgroups.release(group);
                Err(cannot_clone(error))
            }
        }
    });
    let Starting {
        config,
        child,
        ends,
        group,
    } = started.await.map_err(internal)??;
    let Child { pid, outcome, exit } = child;
    let channels = async {
        executed(&agent.processes, pid, outcome, deadline, &command).await?;
        channels(ends, terminal.is_some()).map_err(|error| {
            agent.processes.signal(pid, Signal::KILL);
            internal(error)
        })
    };
    let (input, outputs) = match channels.await {
        Ok(channels) => channels,
        Err(error) => {
            agent.cgroups.release(group);
            return Err(error);
        }
    };
    let process = Arc::new(Process::new(pid, config, tag, input));
    let events = process.output.listen();
    agent.processes.add(process.clone());
    tokio::spawn(async move {
        supervise::see_through(&agent.processes, process, exit, outputs, deadline).await;
        agent.cgroups.release(group);
    });
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

fn channels(ends: Ends, is_terminal: bool) -> io::Result<(Input, Outputs)> {
    let mut outputs = Vec::new();
    for (source, fd) in ends.outputs {
        outputs.push((source, Arc::new(Channel::new(fd)?)));
    }
    let input = match ends.input {
        Some(fd) => Input::pipe(Channel::new(fd)?),
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

pub async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
