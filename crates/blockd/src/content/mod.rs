//! What is in a file, out of its wrappings: tar( zfile( content ) ), each optional and told by its
//! magic. Every byte of a file is hostile input here; errors of kind `InvalidData` say what is wrong
//! and where. Knows nothing of layers.

mod tar;
#[cfg(test)]
mod tests;
mod zfile;

use std::io;
use std::sync::Arc;

use crate::backend::Blob;

/// The content of `blob`, for reading; `blob` itself when nothing is wrapped around it.
pub fn unwrap(blob: Arc<dyn Blob>) -> io::Result<Arc<dyn Blob>> {
    zfile::unwrap(tar::unwrap(blob)?)
}

fn corrupt(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn read_only() -> io::Error {
    io::Error::from_raw_os_error(libc::EROFS)
}

/// The first 512 bytes, when there are as many.
fn first_block(blob: &dyn Blob) -> io::Result<Option<[u8; 512]>> {
    if blob.len()? < 512 {
        return Ok(None);
    }
    let mut block = [0; 512];
    blob.read_at(&mut block, 0)?;
    Ok(Some(block))
}
