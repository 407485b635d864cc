//! A running process until its end: its output, its deadline, its last words.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustix::process::Signal;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use super::channel::Channel;
use super::launch::at;
use super::output::{End, Event, Exit, Source};
use super::table::{Process, Table};

const PIPE_CHUNK: usize = 32 << 10;
const TERMINAL_CHUNK: usize = 16 << 10;
/// What a pipe holds: a process's own last words are at most that much behind its exit.
const PIPE_CAPACITY: usize = 64 << 10;
/// Once a process has ended, a descendant that keeps its output open is listened to until it is silent for this long …
const SILENCE: Duration = Duration::from_millis(100);
/// … and, if it never is, for this long in all.
const AFTERMATH: Duration = Duration::from_secs(1);

/// What a process writes to.
pub type Outputs = Vec<(Source, Arc<Channel>)>;

/// Until the process has ended, by itself or at its deadline, and all it wrote has been handed out.
pub async fn see_through(
    table: &Table,
    process: Arc<Process>,
    mut exit: oneshot::Receiver<Exit>,
    outputs: Outputs,
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
            exit = &mut exit => break exit.unwrap_or(Exit::Signal(Signal::KILL.as_raw())),
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
