//! The payload of a tar archive.

use std::io;
use std::sync::Arc;

use super::{corrupt, first_block, read_only};
use crate::backend::Blob;
use crate::format::tar::{self, BLOCK, PAX_PAYLOAD};

/// A part of another file.
struct Payload {
    inner: Arc<dyn Blob>,
    start: u64,
    length: u64,
}

/// `blob` itself when it is no tar archive.
pub fn unwrap(blob: Arc<dyn Blob>) -> io::Result<Arc<dyn Blob>> {
    let Some(first) = first_block(&*blob)?.filter(tar::is_there) else {
        return Ok(blob);
    };
    let no_size = || corrupt("tar header: its size is no octal number");
    let size = tar::size(&first).ok_or_else(no_size)?;
    let (start, length) = if tar::is_pax(&first) {
        if size > BLOCK as u64 {
            return Err(corrupt(
                "tar: a pax header of more than 512 bytes is not supported",
            ));
        }
        let mut records = [0; BLOCK];
        blob.read_at(&mut records, BLOCK as u64)?;
        let recorded = tar::pax_size(&records[..size as usize])
            .ok_or_else(|| corrupt("tar at 512: malformed pax records"))?;
        let length = match recorded.filter(|size| *size > 0) {
            Some(size) => size,
            None => {
                let mut member = [0; BLOCK];
                blob.read_at(&mut member, 2 * BLOCK as u64)?;
                tar::size(&member).ok_or_else(no_size)?
            }
        };
        (PAX_PAYLOAD, length)
    } else {
        (BLOCK as u64, size)
    };
    let end = start.checked_add(length);
    let file = blob.len()?;
    if end.is_none_or(|end| end > file) {
        return Err(corrupt(format!(
            "tar: its member of {length} bytes ends after the file, which is cut off"
        )));
    }
    Ok(Arc::new(Payload {
        inner: blob,
        start,
        length,
    }))
}

impl Blob for Payload {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.inner.read_at(buffer, self.start + offset)
    }

    fn write_at(&self, _data: &[u8], _offset: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.length)
    }

    fn set_len(&self, _length: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn write_out(&self, offset: u64, length: u64, wait: bool) -> io::Result<()> {
        self.inner.write_out(self.start + offset, length, wait)
    }
}
