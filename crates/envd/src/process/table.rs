//! The running processes, and the reaping of every child this process gets: as PID 1 it inherits the sandbox's orphans too.
//!
//! One lock covers cloning, reaping and signalling. So a child cannot be reaped before it is known, and a signal cannot reach
//! a stranger who was given the number of a process that has just gone.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, wait};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::input::Input;
use super::output::{End, Exit, Output};
use super::spawn::{Program, spawn};
use crate::proto::process::ProcessConfig;

/// Ended processes that a late Connect still gets an answer about.
const REMEMBERED: usize = 256;
/// Children reaped before other work gets its turn: a dying fork bomb leaves thousands.
const REAP_BATCH: usize = 256;

pub struct Process {
    pub pid: u32,
    pub config: ProcessConfig,
    pub tag: Option<String>,
    pub output: Output,
    pub input: Input,
    exited: AtomicBool,
}

/// A clone that has not executed its program yet.
pub struct Child {
    pub pid: u32,
    pub outcome: OwnedFd,
    pub exit: oneshot::Receiver<Exit>,
}

#[derive(Clone)]
pub enum Selector {
    Pid(u32),
    Tag(String),
}

/// A process found by a selector.
pub enum Found {
    Running(Arc<Process>),
    Ended(u32, End),
}

#[derive(Clone)]
pub struct Table(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Every child that is to be told apart from an orphan, until it is reaped.
    children: HashMap<u32, oneshot::Sender<Exit>>,
    processes: BTreeMap<u32, Arc<Process>>,
    ended: VecDeque<(u32, Option<String>, End)>,
}

impl Process {
    pub fn new(pid: u32, config: ProcessConfig, tag: Option<String>, input: Input) -> Self {
        Self {
            pid,
            config,
            tag,
            output: Output::default(),
            input,
            exited: AtomicBool::new(false),
        }
    }

    /// Marks it as ended while its output is still being read: it is no longer listed, nor signalled.
    pub fn set_exited(&self) {
        self.exited.store(true, Ordering::Release);
    }

    fn is_running(&self) -> bool {
        !self.exited.load(Ordering::Acquire)
    }
}

impl Selector {
    fn matches(&self, pid: u32, tag: Option<&str>) -> bool {
        match self {
            Self::Pid(wanted) => *wanted == pid,
            Self::Tag(wanted) => tag == Some(wanted),
        }
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pid(pid) => write!(formatter, "process with pid {pid}"),
            Self::Tag(tag) => write!(formatter, "process with tag {tag}"),
        }
    }
}

impl Table {
    /// Empty, with the task that reaps. Call it within the runtime.
    pub fn new() -> io::Result<Self> {
        let table = Self(Arc::default());
        let mut deaths = signal(SignalKind::child())?;
        let reaping = table.clone();
        tokio::spawn(async move {
            while deaths.recv().await.is_some() {
                while reaping.reap() == REAP_BATCH {
                    tokio::task::yield_now().await;
                }
            }
        });
        Ok(table)
    }

    /// Clones `program` in `cgroup`; without one, beside the agent.
    pub fn spawn(&self, program: &Program, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Child> {
        let mut state = self.state();
        let spawned = spawn(program, cgroup)?;
        let (sender, exit) = oneshot::channel();
        state.children.insert(spawned.pid, sender);
        Ok(Child {
            pid: spawned.pid,
            outcome: spawned.outcome,
            exit,
        })
    }

    pub fn add(&self, process: Arc<Process>) {
        self.state().processes.insert(process.pid, process);
    }

    /// Forgets a process whose last event was published.
    pub fn retire(&self, process: &Arc<Process>, end: End) {
        let mut state = self.state();
        if state
            .processes
            .get(&process.pid)
            .is_some_and(|known| Arc::ptr_eq(known, process))
        {
            state.processes.remove(&process.pid);
        }
        if state.ended.len() == REMEMBERED {
            state.ended.pop_front();
        }
        state
            .ended
            .push_back((process.pid, process.tag.clone(), end));
    }

    pub fn running(&self) -> Vec<Arc<Process>> {
        self.state()
            .processes
            .values()
            .filter(|process| process.is_running())
            .cloned()
            .collect()
    }

    pub fn find_running(&self, selector: &Selector) -> Option<Arc<Process>> {
        let state = self.state();
        let mut newest_first = state.processes.values().rev();
        newest_first
            .find(|process| {
                process.is_running() && selector.matches(process.pid, process.tag.as_deref())
            })
            .cloned()
    }

    /// A running process, one whose output is still being read, or one that has ended not long ago.
    pub fn find(&self, selector: &Selector) -> Option<Found> {
        let state = self.state();
        let known = state
            .processes
            .values()
            .rev()
            .find(|process| selector.matches(process.pid, process.tag.as_deref()));
        if let Some(process) = known {
            return Some(Found::Running(process.clone()));
        }
        let ended = state
            .ended
            .iter()
            .rev()
            .find(|(pid, tag, _)| selector.matches(*pid, tag.as_deref()));
        ended.map(|(pid, _, end)| Found::Ended(*pid, end.clone()))
    }

    /// Signals the process group of a child of ours; false when it has ended.
    pub fn signal(&self, pid: u32, signal: Signal) -> bool {
        let state = self.state();
        let Some(target) = Pid::from_raw(pid as i32).filter(|_| state.children.contains_key(&pid))
        else {
            return false;
        };
        // Before its setsid a child has no group of its own yet.
        kill_process_group(target, signal)
            .or_else(|_| kill_process(target, signal))
            .is_ok()
    }

    /// Ends the streams of all clients. The processes go on.
    pub fn cut_streams(&self) {
        for process in self.state().processes.values() {
            process.output.cut();
        }
    }

    /// Collects up to `REAP_BATCH` dead children; how many there were.
    fn reap(&self) -> usize {
        let mut state = self.state();
        for count in 0..REAP_BATCH {
            let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) else {
                return count;
            };
            let exit = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Exit::Code(code),
                (None, Some(signal)) => Exit::Signal(signal),
                (None, None) => continue,
            };
            if let Some(waiting) = state.children.remove(&(pid.as_raw_nonzero().get() as u32)) {
                // Its launch may have been given up meanwhile.
                let _ = waiting.send(exit);
            }
        }
        REAP_BATCH
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
