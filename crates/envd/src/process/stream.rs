//! The stream of events that Start and Connect answer with.

use std::time::Duration;

use connectrpc::{ConnectError, RequestContext, Response, ServiceStream};
use futures::StreamExt;
use futures::stream::unfold;
use tokio::sync::mpsc::Receiver;

use super::launch;
use super::output::{Event, Exit, Source};
use crate::proto::process::{ProcessEvent, process_event};

const KEEPALIVE_DEFAULT_S: u64 = 90;

/// What a stream still has to say.
enum Phase {
    Start(Receiver<Event>),
    Live(Receiver<Event>),
    Over,
}

/// Events of one process, as a client is told them.
pub struct Stream {
    pid: u32,
    phase: Phase,
    keepalive: Duration,
    /// Whether it is the Start stream, whose deadline is the process's.
    owns_deadline: bool,
}

impl Stream {
    /// `owns_deadline`: it is the Start stream, whose end tells of the deadline.
    pub fn new(
        ctx: &RequestContext,
        pid: u32,
        events: Receiver<Event>,
        owns_deadline: bool,
    ) -> Self {
        let asked = ctx
            .header("keepalive-ping-interval")
            .and_then(|value| value.to_str().ok()?.parse().ok());
        let keepalive = Duration::from_secs(asked.unwrap_or(KEEPALIVE_DEFAULT_S).max(1));
        Self {
            pid,
            phase: Phase::Start(events),
            keepalive,
            owns_deadline,
        }
    }

    async fn next(mut self) -> Option<(Result<ProcessEvent, ConnectError>, Self)> {
        let event = match self.phase {
            Phase::Start(receiver) => {
                self.phase = Phase::Live(receiver);
                Ok(process_event::StartEvent {
                    pid: self.pid,
                    ..Default::default()
                }
                .into())
            }
            Phase::Over => return None,
            Phase::Live(ref mut events) => {
                match tokio::time::timeout(self.keepalive, events.recv()).await {
                    Err(_) => Ok(process_event::KeepAlive::default().into()),
                    Ok(Some(Event::Data(source, data))) => Ok(data_event(source, &data).into()),
                    Ok(Some(Event::End(end))) => {
                        self.phase = Phase::Over;
                        if self.owns_deadline && end.timed_out {
                            Err(launch::deadline_exceeded())
                        } else {
                            Ok(end_event(end.exit).into())
                        }
                    }
                    Ok(None) => {
                        self.phase = Phase::Over;
                        Err(ConnectError::unavailable(
                            "this stream was cut: its reader was too slow, or from an earlier life of the sandbox",
                        ))
                    }
                }
            }
        };
        let event = event.map(|event: process_event::Event| ProcessEvent {
            event: Some(event),
            ..Default::default()
        });
        Some((event, self))
    }

    /// The response whose messages are the events, each wrapped.
    pub fn respond<T: Send + 'static>(
        self,
        wrap: fn(ProcessEvent) -> T,
    ) -> Response<ServiceStream<T>> {
        Response::stream(unfold(self, Self::next).map(move |event| event.map(wrap)))
    }
}

fn data_event(source: Source, data: &[u8]) -> process_event::DataEvent {
    use process_event::data_event::Output;

    let data = data.to_vec();
    let output = match source {
        Source::Stdout => Output::Stdout(data),
        Source::Stderr => Output::Stderr(data),
        Source::Terminal => Output::Pty(data),
    };
    process_event::DataEvent {
        output: Some(output),
        ..Default::default()
    }
}

fn end_event(exit: Exit) -> process_event::EndEvent {
    let (exit_code, status) = match exit {
        Exit::Code(code) => (code, format!("exit status {code}")),
        Exit::Signal(signal) => (-1, format!("signal: {}", signal_name(signal))),
    };
    process_event::EndEvent {
        exit_code,
        exited: matches!(exit, Exit::Code(_)),
        error: (exit != Exit::Code(0)).then(|| status.clone()),
        status,
        ..Default::default()
    }
}

/// As clients expect signals to be called.
fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}
