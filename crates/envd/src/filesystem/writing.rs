//! Writing an uploaded file: one blocking task a file, fed through a short queue, so that an upload of any size needs little memory.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use flate2::write::GzDecoder;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinHandle;

use super::tree::make_directories;
use crate::users::User;

const QUEUE_CHUNKS: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    Identity,
    Gzip,
}

enum Message {
    Data(Bytes),
    Complete,
}

/// A file being written. Dropped before `finish`, it is as a failed one: removed if it is new, else left with what had arrived.
pub struct Writer {
    queue: Sender<Message>,
    task: JoinHandle<io::Result<()>>,
}

impl Writer {
    /// Starts to write `path`: missing parents are made, an existing file is emptied and keeps its owner and mode, a new one is
    /// the user's, mode 0644.
    pub fn create(path: PathBuf, user: User, encoding: Encoding) -> Self {
        let (queue, messages) = channel(QUEUE_CHUNKS);
        let task = tokio::task::spawn_blocking(move || write(&path, &user, encoding, messages));
        Self { queue, task }
    }

    /// Waits while the disk is behind. False: it has failed, `finish` says how.
    pub async fn write(&mut self, chunk: Bytes) -> bool {
        self.queue.send(Message::Data(chunk)).await.is_ok()
    }

    /// Errors: `IsADirectory`, `InvalidInput` for another kind of file, `InvalidData` for what is not gzip, `StorageFull`, …
    pub async fn finish(self) -> io::Result<()> {
        // A task that failed has closed its queue.
        let _ = self.queue.send(Message::Complete).await;
        self.task.await.map_err(io::Error::other)?
    }
}

fn write(
    path: &Path,
    user: &User,
    encoding: Encoding,
    messages: Receiver<Message>,
) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        make_directories(parent, user)?;
    }
    let (file, is_new) = open(path, user)?;
    let written = match encoding {
        Encoding::Identity => receive(file, messages).map(drop),
        Encoding::Gzip => receive(GzDecoder::new(file), messages)
            .and_then(|decoder| decoder.finish())
            .map(drop),
    };
    if written.is_err() && is_new {
        let _ = std::fs::remove_file(path);
    }
    written
}

fn receive<W: Write>(mut target: W, mut messages: Receiver<Message>) -> io::Result<W> {
    loop {
        match messages.blocking_recv() {
            Some(Message::Data(chunk)) => target.write_all(&chunk)?,
            Some(Message::Complete) => return Ok(target),
            None => {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    "the upload broke off",
                ));
            }
        }
    }
}

/// Opens for writing what is, or becomes, a regular file; never waits for the reader of a FIFO.
fn open(path: &Path, user: &User) -> io::Result<(File, bool)> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Err(ErrorKind::IsADirectory.into()),
        Ok(metadata) if !metadata.is_file() => {
            return Err(io::Error::new(
                ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        Ok(_) => {
            let file = OpenOptions::new()
                .write(true)
                .truncate(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(path)?;
            return Ok((file, false));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    // Without `create_new`: the name may be a symbolic link to a file that does not exist yet.
    let mut options = OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    fchown(&file, Some(user.uid), Some(user.gid))?;
    Ok((file, true))
}
