//! What clients send to a process.

use std::sync::Arc;
use std::time::Duration;

use connectrpc::ConnectError;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::channel::Channel;

/// Longest wait for writes in progress when standard input is to be closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);

/// Where it goes.
pub enum Input {
    None,
    /// Empty once closed.
    Pipe(Mutex<Option<Channel>>),
    Terminal(Arc<Channel>),
}

impl Input {
    pub fn pipe(channel: Channel) -> Self {
        Self::Pipe(Mutex::new(Some(channel)))
    }

    /// Writes `data` to standard input or, with `to_terminal`, to the terminal.
    ///
    /// Errors: `internal` when there is none or it was closed, `failed_precondition` when there is the other kind.
    pub async fn send(&self, to_terminal: bool, data: &[u8]) -> Result<(), ConnectError> {
        let written = match self {
            Self::None => {
                return Err(ConnectError::internal(
                    "stdin is not enabled for this process",
                ));
            }
            Self::Pipe(_) if to_terminal => {
                return Err(ConnectError::failed_precondition(
                    "the process has no terminal",
                ));
            }
            Self::Terminal(_) if !to_terminal => {
                return Err(ConnectError::failed_precondition(
                    "the process has a terminal: send pty input",
                ));
            }
            Self::Pipe(pipe) => match &*pipe.lock().await {
                Some(pipe) => pipe.write_all(data).await,
                None => return Err(ConnectError::internal("stdin is closed")),
            },
            Self::Terminal(terminal) => terminal.write_all(data).await,
        };
        written.map_err(|error| {
            ConnectError::internal(format!("cannot write to the process: {error}"))
        })
    }

    /// Closes standard input, after what was sent before. Idempotent.
    ///
    /// Errors: `failed_precondition` for a terminal, `unavailable` when the process does not take what was sent.
    pub async fn close(&self) -> Result<(), ConnectError> {
        match self {
            Self::None => Ok(()),
            Self::Terminal(_) => Err(ConnectError::failed_precondition(
                "a terminal cannot be closed: send it an end-of-file (^D)",
            )),
            Self::Pipe(pipe) => {
                let locked = timeout(CLOSE_PATIENCE, pipe.lock()).await;
                let unread = |_| {
                    ConnectError::unavailable(
                        "the process does not read what was sent to it before",
                    )
                };
                *locked.map_err(unread)? = None;
                Ok(())
            }
        }
    }
}
