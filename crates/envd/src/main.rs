//! envd: the agent inside every sandbox.
//!
//! As PID 1 of our initramfs it makes the machine usable (`boot`), then serves on port 49983: E2B's envd protocol to SDKs
//! (`process`, `filesystem`, `http`) and the node's control calls (`control`, docs/protocols/envd.md). Run as an ordinary
//! program it only serves. Nothing in the sandbox's image is needed for it to run.
//!
//! One thread runs everything that cannot block; system calls that may (files, mounts a user made) run on tokio's blocking
//! pool, so that no file system of the sandbox can make the agent deaf.

mod arguments;
mod boot;
mod cgroup;
mod control;
mod environment;
mod filesystem;
mod http;
mod log;
mod machine;
mod metrics;
mod process;
mod smallfile;
mod state;
mod users;

/// Messages and service traits generated from proto/. Names are the protocol's.
#[allow(clippy::upper_case_acronyms)]
mod proto {
    connectrpc::include_generated!("connect.rs");
}

use std::process::ExitCode;

use arguments::{Arguments, Invocation};

/// The version of E2B's envd whose behaviour SDKs may expect of this one.
pub const ENVD_VERSION: &str = "0.6.13";
pub const PORT: u16 = 49983;

fn main() -> ExitCode {
    let started = match Invocation::detect(std::env::args().skip(1)) {
        Ok(Invocation::Version) => {
            println!("{ENVD_VERSION}");
            return ExitCode::SUCCESS;
        }
        Ok(Invocation::Init) => boot::run(),
        Ok(Invocation::Program(arguments)) => boot::as_program(&arguments),
        Err(message) => {
            eprintln!("envd: {message}\n{}", Arguments::USAGE);
            return ExitCode::from(2);
        }
    };
    // As PID 1, returning makes the kernel panic with the message above it on the console, which is what the VMM reports.
    match started.and_then(serve) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::write(format_args!("fatal: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn serve(started: boot::Started) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let agent = state::Agent::new(started.cgroups, started.machine)?;
        let serve =
            |(listener, control)| http::serve(listener, http::router(agent.clone(), control));
        log::write(format_args!("{ENVD_VERSION} serving"));
        futures::future::try_join_all(started.listeners.into_iter().map(serve))
            .await
            .map(drop)
    })
}
