//! Copying what is in a source, page by page, into a layer: the common part of capturing memory and
//! importing files.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::Files;
use crate::error::{Error, Result};
use crate::format::lsmt::{Entry, MAX_VIRTUAL_SIZE, SECTOR};
use crate::layer::index::push_joined;
use crate::layer::writer::{LayerWriter, Written};

pub const PAGE: u64 = 4096;
/// What one thread works on at a time, bytes.
const WINDOW: u64 = 16 << 20;
/// What is read and written at a time, bytes.
const BATCH: usize = 1 << 20;
/// More gain nothing: memory bandwidth is the limit.
const THREADS: usize = 2;
const PAGE_SECTORS: u64 = PAGE / SECTOR;

/// Something that has content in places. Offsets are those in the layer, multiples of [`PAGE`].
pub trait Source: Sync {
    /// Where content may be: whole pages, disjoint.
    fn ranges(&self) -> Vec<Range<u64>>;
    /// The parts of `window`, which lies in one of the ranges, that have content: sorted, whole
    /// pages.
    fn extents(&self, window: Range<u64>) -> Result<Vec<Range<u64>>>;
    /// Fills `buffer`, whole pages within one extent.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()>;
}

/// What becomes of a page of zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ZeroPages {
    /// A zeroed mapping, since what lies below may not be zero.
    Map,
    /// Left out: there is nothing below.
    Omit,
}

/// Pages that had content.
#[derive(Clone, Copy, Default)]
pub struct Copied {
    /// Stored as data.
    pub pages: u64,
    /// Found to be all zeros.
    pub zero_pages: u64,
}

/// Copies all content of `source` into `writer`.
fn copy(source: &dyn Source, writer: &LayerWriter, zeros: ZeroPages) -> Result<Copied> {
    let windows: Vec<Range<u64>> = source
        .ranges()
        .into_iter()
        .flat_map(|range| {
            let end = range.end;
            (range.start..end)
                .step_by(WINDOW as usize)
                .map(move |start| start..end.min(start + WINDOW))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut batch = Batch::new(writer, zeros);
        while let Some(window) = windows.get(next.fetch_add(1, Ordering::Relaxed)) {
            for extent in source.extents(window.clone())? {
                batch.copy(source, extent)?;
            }
        }
        batch.write()?;
        Ok(batch.copied)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..THREADS.min(windows.len()))
            .map(|_| scope.spawn(work))
            .collect();
        let mut total = work();
        for thread in threads {
            let part = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            total = total.and_then(|total| {
                let part = part?;
                Ok(Copied {
                    pages: total.pages + part.pages,
                    zero_pages: total.zero_pages + part.zero_pages,
                })
            });
        }
        total
    })
}

/// Copies a source into a new layer of `size` bytes; after a failure there is none.
pub fn make_layer(
    files: Arc<dyn Files>,
    layer: &Path,
    size: u64,
    source: &dyn Source,
    zeros: ZeroPages,
) -> Result<(Written, Copied)> {
    let writer = LayerWriter::create(files, layer, size)?;
    let copied = copy(source, &writer, zeros)?;
    Ok((writer.finish()?, copied))
}

/// The size of a memory image: some whole pages.
pub fn check_memory_size(size: u64) -> Result<()> {
    if size == 0 || !size.is_multiple_of(PAGE) || size > MAX_VIRTUAL_SIZE {
        return Err(Error::invalid(format!(
            "size {size}: it must be a positive multiple of {PAGE}"
        )));
    }
    Ok(())
}

/// Pages of one thread on their way to the layer.
struct Batch<'a> {
    writer: &'a LayerWriter,
    zeros: ZeroPages,
    buffer: Vec<u8>,
    filled: usize,
    /// Physical sectors count from the start of the buffer.
    entries: Vec<Entry>,
    copied: Copied,
}

impl<'a> Batch<'a> {
    fn new(writer: &'a LayerWriter, zeros: ZeroPages) -> Self {
        Self {
            writer,
            zeros,
            buffer: vec![0; BATCH],
            filled: 0,
            entries: Vec::new(),
            copied: Copied::default(),
        }
    }

    fn copy(&mut self, source: &dyn Source, extent: Range<u64>) -> Result<()> {
        let mut at = extent.start;
        while at < extent.end {
            if self.filled == BATCH {
                self.write()?;
            }
            let length = (BATCH - self.filled).min((extent.end - at) as usize);
            source.read(at, &mut self.buffer[self.filled..self.filled + length])?;
            self.keep(at, length);
            at += length as u64;
        }
        Ok(())
    }

    /// Takes over `length` bytes just read behind the filled part, closing the gaps that zero pages
    /// leave.
    fn keep(&mut self, offset: u64, length: usize) {
        let start = self.filled;
        for from in (start..start + length).step_by(PAGE as usize) {
            let sector = (offset + (from - start) as u64) / SECTOR;
            let page = from..from + PAGE as usize;
            if is_zero(&self.buffer[page.clone()]) {
                self.copied.zero_pages += 1;
                if self.zeros == ZeroPages::Map {
                    self.push(Entry::zeroed(sector, PAGE_SECTORS));
                }
            } else {
                self.copied.pages += 1;
                self.push(Entry::data(
                    sector,
                    PAGE_SECTORS,
                    self.filled as u64 / SECTOR,
                ));
                if from != self.filled {
                    self.buffer.copy_within(page, self.filled);
                }
                self.filled += PAGE as usize;
            }
        }
    }

    fn push(&mut self, entry: Entry) {
        push_joined(&mut self.entries, entry);
    }

    fn write(&mut self) -> Result<()> {
        self.writer
            .append(&self.buffer[..self.filled], &self.entries)?;
        self.filled = 0;
        self.entries.clear();
        Ok(())
    }
}

fn is_zero(page: &[u8]) -> bool {
    // In steps that the compiler turns into wide loads; most pages differ in the first.
    page.chunks(256)
        .all(|chunk| chunk.iter().fold(0, |seen, byte| seen | byte) == 0)
}
