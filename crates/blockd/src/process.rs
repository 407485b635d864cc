//! The process as such: signals, privileges, limits.

use std::io;

/// Signals that end the daemon in order.
const ENDING: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];

/// SIGHUP, as of a closed terminal, is ignored, and the ending signals wait for [`wait_for_end`].
/// To be called before there are threads, which inherit this.
pub fn hold_signals() {
    // SAFETY: plain calls with valid arguments.
    unsafe {
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        libc::pthread_sigmask(libc::SIG_BLOCK, &ending(), std::ptr::null_mut());
    }
}

/// Returns when the process was asked to end.
pub fn wait_for_end() {
    let mut signal = 0;
    // SAFETY: `ending` is a valid set, all of it blocked; `signal` lives across the call.
    while unsafe { libc::sigwait(&ending(), &raw mut signal) } != 0 {}
}

/// Lets [`wait_for_end`] return.
pub fn ask_to_end() {
    // SAFETY: a signal to ourselves, which is blocked in all threads and waited for.
    unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
}

fn ending() -> libc::sigset_t {
    // SAFETY: sigset_t is plain data; sigemptyset makes it valid.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in ENDING {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}

/// Every layer of every stack is an open file.
pub fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` lives across both calls. Failing leaves the limit as it was.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// Becomes `uid`, with the group of the same number and no other, for good.
pub fn drop_privileges(uid: u32) -> io::Result<()> {
    let check = |result: libc::c_int| {
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    // SAFETY: plain calls; the null pointer goes with a count of zero.
    unsafe {
        check(libc::setgroups(0, std::ptr::null()))?;
        check(libc::setresgid(uid, uid, uid))?;
        check(libc::setresuid(uid, uid, uid))?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    }
}
