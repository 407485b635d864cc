//! Reading a file for a download, chunk by chunk on the blocking pool.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use bytes::Bytes;
use futures::Stream;
use futures::stream::unfold;

use crate::state::blocking;

const CHUNK: usize = 256 << 10;

/// A regular file, open.
pub struct Readable {
    file: File,
    /// Absent where the file system does not say, as in /proc.
    pub length: Option<u64>,
    /// What was read to find that out.
    first: Bytes,
}

/// Opens a regular file without waiting for anything.
///
/// Errors: `IsADirectory`; `InvalidInput` for what is neither (a FIFO would wait, a device may never end).
pub fn open(path: &Path) -> io::Result<Readable> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    if metadata.len() > 0 {
        return Ok(Readable {
            file,
            length: Some(metadata.len()),
            first: Bytes::new(),
        });
    }
    // Empty, or one that only says so.
    let first = read(&mut file, CHUNK)?;
    Ok(Readable {
        file,
        length: first.is_empty().then_some(0),
        first,
    })
}

/// Up to `limit` bytes; none at the end, which is also where a file that would have to wait ends.
fn read(file: &mut File, limit: usize) -> io::Result<Bytes> {
    let mut buffer = vec![0; limit];
    loop {
        match file.read(&mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer.into());
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Bytes::new()),
            Err(error) => return Err(error),
        }
    }
}

impl Readable {
    /// `count` bytes from `start` on. A file that shrinks meanwhile ends the stream with an error, so that the client cannot
    /// take the part for the whole; what it grows by is left out.
    pub fn stream(
        self,
        start: u64,
        count: Option<u64>,
    ) -> impl Stream<Item = io::Result<Bytes>> + Send {
        let left = count.or(self.length);
        let initial = Some((self.file, self.first, start, left));
        unfold(initial, |state| async move {
            let (mut file, first, seek, left) = state?;
            if left == Some(0) {
                return None;
            }
            if !first.is_empty() {
                return Some((Ok(first), Some((file, Bytes::new(), 0, left))));
            }
            let limit = left.map_or(CHUNK, |left| {
                CHUNK.min(usize::try_from(left).unwrap_or(CHUNK))
            });
            let read = blocking(move || {
                if seek > 0 {
                    file.seek(SeekFrom::Start(seek))?;
                }
                read(&mut file, limit).map(|chunk| (chunk, file))
            })
            .await
            .and_then(|read| read);
            match read {
                Ok((chunk, _)) if chunk.is_empty() && left.is_none() => None,
                Ok((chunk, _)) if chunk.is_empty() => {
                    Some((Err(ErrorKind::UnexpectedEof.into()), None))
                }
                Ok((chunk, file)) => {
                    let left = left.map(|left| left - chunk.len() as u64);
                    Some((Ok(chunk), Some((file, Bytes::new(), 0, left))))
                }
                Err(error) => Some((Err(error), None)),
            }
        })
    }
}
