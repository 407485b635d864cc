//! Starting a program: clone into its control group, become the user, exec.
//!
//! The child shares nothing but memory copies and may only make system calls. They are made raw: a C library's wrappers for
//! user and group changes wait for the other threads, which do not exist on this side.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

/// Everything the child needs, prepared before the clone.
pub struct Program {
    /// Absolute or relative to `directory`; the first that can be executed is.
    pub candidates: Vec<CString>,
    pub arguments: Vec<CString>,
    pub environment: Vec<CString>,
    pub directory: CString,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    /// Standard input, output and error.
    pub stdio: [OwnedFd; 3],
    /// Whether standard input is a terminal for the process to control.
    pub terminal: bool,
}

/// A child on its way to exec.
pub struct Spawned {
    pub pid: u32,
    /// At its end without a byte when exec succeeded; else yields a `Failure`.
    pub outcome: OwnedFd,
}

/// What the child reports when it cannot exec: the step, then errno.
pub struct Failure {
    step: u8,
    error: io::Error,
}

const STEPS: [&str; 7] = [
    "new session",
    "controlling terminal",
    "standard streams",
    "groups",
    "user",
    "working directory",
    "execute",
];
const EXECUTE: u8 = 6;

/// Linux: include/uapi/linux/sched.h. (Wider than the `c_int` of its siblings in the libc crate.)
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

impl Failure {
    pub const LENGTH: usize = 5;

    pub fn parse(report: [u8; Self::LENGTH]) -> Self {
        let [step, errno @ ..] = report;
        Self {
            step,
            error: io::Error::from_raw_os_error(i32::from_ne_bytes(errno)),
        }
    }

    /// Whether the request, rather than the machine, is at fault.
    pub fn is_callers(&self) -> bool {
        self.step >= EXECUTE - 1
    }

    pub fn describe(&self, program: &str) -> String {
        match STEPS.get(usize::from(self.step)) {
            Some(&"execute") | None => format!("cannot execute '{program}': {}", self.error),
            Some(step) => format!("cannot start '{program}': {step}: {}", self.error),
        }
    }
}

/// Clones a child that will execute `program`, in `cgroup` from its first instruction on.
///
/// Errors: `WouldBlock` when the group, or the machine, has no process number left.
pub fn spawn(program: &Program, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Spawned> {
    let (outcome, report) = io::pipe()?;
    let [arguments, environment] =
        [&program.arguments, &program.environment].map(|strings| pointers(strings));
    // SAFETY: an all-zero clone_args is valid: no flags, no addresses.
    let mut clone: libc::clone_args = unsafe { std::mem::zeroed() };
    clone.exit_signal = libc::SIGCHLD as u64;
    if let Some(directory) = cgroup {
        clone.flags = CLONE_INTO_CGROUP;
        clone.cgroup = directory.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM this is a fork: the child gets its own copy of this memory and goes on right here, where it only
    // calls `child`, which does not return.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw const clone,
            size_of::<libc::clone_args>(),
        )
    };
    match pid {
        0 => child(program, &arguments, &environment, report.as_raw_fd()),
        pid if pid > 0 => Ok(Spawned {
            pid: pid as u32,
            outcome: outcome.into(),
        }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings
        .iter()
        .map(|string| string.as_ptr())
        .chain([ptr::null()])
        .collect()
}

/// The child: no allocation, no lock, no panic.
fn child(
    program: &Program,
    arguments: &[*const libc::c_char],
    environment: &[*const libc::c_char],
    report: RawFd,
) -> ! {
    let (step, errno) = match become_program(program, arguments, environment) {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    let mut message = [step; Failure::LENGTH];
    message[1..].copy_from_slice(&errno.to_ne_bytes());
    // SAFETY: writes `message` whole into the report pipe, then ends the process without running anything of the parent's.
    unsafe {
        libc::syscall(libc::SYS_write, report, message.as_ptr(), message.len());
        libc::_exit(127)
    }
}

type Step<T> = Result<T, (u8, i32)>;

fn become_program(
    program: &Program,
    arguments: &[*const libc::c_char],
    environment: &[*const libc::c_char],
) -> Step<std::convert::Infallible> {
    let check = |step: u8, result: libc::c_long| {
        if result < 0 {
            Err((step, errno()))
        } else {
            Ok(())
        }
    };
    // SAFETY: system calls on integers, on descriptors that are open, and on memory of `program`, which outlives this process
    // image. signal() only sets a disposition; the runtime ignores SIGPIPE, a program expects the default.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        check(0, libc::syscall(libc::SYS_setsid))?;
        if program.terminal {
            check(
                1,
                libc::syscall(
                    libc::SYS_ioctl,
                    program.stdio[0].as_raw_fd(),
                    libc::TIOCSCTTY,
                    0,
                ),
            )?;
        }
        for (target, fd) in (0..).zip(&program.stdio) {
            check(2, libc::syscall(libc::SYS_dup3, fd.as_raw_fd(), target, 0))?;
        }
        reset_oom_score();
        libc::syscall(libc::SYS_umask, 0o022);
        check(
            3,
            libc::syscall(
                libc::SYS_setgroups,
                program.groups.len(),
                program.groups.as_ptr(),
            ),
        )?;
        check(
            3,
            libc::syscall(libc::SYS_setresgid, program.gid, program.gid, program.gid),
        )?;
        check(
            4,
            libc::syscall(libc::SYS_setresuid, program.uid, program.uid, program.uid),
        )?;
        check(
            5,
            libc::syscall(libc::SYS_chdir, program.directory.as_ptr()),
        )?;
    }
    Err((
        EXECUTE,
        execute(&program.candidates, arguments, environment),
    ))
}

/// Tries each candidate as execvp does: one that is missing, or may not be executed, is passed over.
fn execute(
    candidates: &[CString],
    arguments: &[*const libc::c_char],
    environment: &[*const libc::c_char],
) -> i32 {
    let mut failure = libc::ENOENT;
    for candidate in candidates {
        // SAFETY: both arrays end with a null pointer and, like the strings they point to, live as long as this process image.
        unsafe {
            libc::syscall(
                libc::SYS_execve,
                candidate.as_ptr(),
                arguments.as_ptr(),
                environment.as_ptr(),
            )
        };
        match errno() {
            libc::ENOENT | libc::ENOTDIR => {}
            libc::EACCES => failure = libc::EACCES,
            other => return other,
        }
    }
    failure
}

/// The agent is exempt from the out-of-memory killer; what it starts is not. Failure leaves what was inherited.
fn reset_oom_score() {
    const FILE: &CStr = c"/proc/self/oom_score_adj";
    // SAFETY: system calls on a constant path, a constant byte and the descriptor just opened.
    unsafe {
        let fd = libc::syscall(
            libc::SYS_open,
            FILE.as_ptr(),
            libc::O_WRONLY | libc::O_CLOEXEC,
        );
        if fd >= 0 {
            libc::syscall(libc::SYS_write, fd, b"0".as_ptr(), 1);
            libc::syscall(libc::SYS_close, fd);
        }
    }
}

fn errno() -> i32 {
    io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}
