//! Reading a zfile at any place.
//!
//! Blocks that a read covers whole are decompressed into its buffer. Of those at its ends a few are
//! kept, since the next read often goes on in them.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{corrupt, first_block, read_only};
use crate::backend::Blob;
use crate::format::zfile::{BLOCK, CRC, Compression, ENTRY, Header, block_crc};

/// Bytes of decompressed blocks kept for one file.
const KEPT: usize = 256 << 10;
/// Compressed bytes read at a time.
const SPAN: u64 = 256 << 10;
const INDEX_CHUNK: u64 = 64 << 10;
/// Blocks whose place is found by adding up lengths from a known one.
const GROUP: usize = 32;

/// Where the blocks are: about 2.25 bytes a block, but 4.25 for the largest blocks.
struct Jumps {
    /// Offset in the file of each group's first block.
    bases: Vec<u64>,
    lengths: Lengths,
    /// Where the last block ends.
    end: u64,
}

enum Lengths {
    Narrow(Vec<u16>),
    Wide(Vec<u32>),
}

impl Jumps {
    fn length(&self, block: usize) -> u64 {
        match &self.lengths {
            Lengths::Narrow(lengths) => u64::from(lengths[block]),
            Lengths::Wide(lengths) => u64::from(lengths[block]),
        }
    }

    /// Bytes of a block in the file, its CRC included.
    fn place(&self, block: usize) -> Range<u64> {
        let first = block / GROUP * GROUP;
        let before: u64 = (first..block).map(|earlier| self.length(earlier)).sum();
        let start = self.bases[block / GROUP] + before;
        start..start + self.length(block)
    }

    fn push(&mut self, length: u32) {
        let count = match &mut self.lengths {
            Lengths::Narrow(lengths) => {
                // Small blocks cannot be longer: see `Header::block_lengths`.
                lengths.push(length as u16);
                lengths.len()
            }
            Lengths::Wide(lengths) => {
                lengths.push(length);
                lengths.len()
            }
        };
        if (count - 1).is_multiple_of(GROUP) {
            self.bases.push(self.end);
        }
        self.end += u64::from(length);
    }

    /// Reads and checks the jump table; what is allocated grows with the bytes that were read.
    fn read(blob: &dyn Blob, header: &Header) -> io::Result<Self> {
        let narrow = *header.block_lengths().end() <= u32::from(u16::MAX);
        let mut jumps = Self {
            bases: Vec::new(),
            lengths: if narrow {
                Lengths::Narrow(Vec::new())
            } else {
                Lengths::Wide(Vec::new())
            },
            end: BLOCK,
        };
        let bytes = header.index_size * ENTRY;
        let mut buffer = vec![0; bytes.min(INDEX_CHUNK) as usize];
        let (mut at, mut crc) = (0, 0);
        while at < bytes {
            let chunk = &mut buffer[..(bytes - at).min(INDEX_CHUNK) as usize];
            let offset = header.index_offset + at;
            blob.read_at(chunk, offset)?;
            crc = crate::format::crc::raw(crc, chunk);
            for (number, entry) in chunk.as_chunks::<{ ENTRY as usize }>().0.iter().enumerate() {
                let length = u32::from_le_bytes(*entry);
                let end = jumps.end + u64::from(length);
                if !header.block_lengths().contains(&length) || end > header.index_offset {
                    return Err(corrupt(format!(
                        "zfile jump table at {}: block {} of impossible length {length}",
                        offset + number as u64 * ENTRY,
                        (at / ENTRY) + number as u64,
                    )));
                }
                jumps.push(length);
            }
            at += chunk.len() as u64;
        }
        let wrong = match header.index_crc {
            Some(expected) if expected != crc => "its CRC is wrong",
            _ if jumps.end != header.index_offset => "its blocks do not end where it begins",
            _ => return Ok(jumps),
        };
        let at = header.index_offset;
        Err(corrupt(format!("zfile jump table at {at}: {wrong}")))
    }
}

/// A decompressed block and its number.
type Kept = Option<(u64, Box<[u8]>)>;

struct Zfile {
    inner: Arc<dyn Blob>,
    header: Header,
    jumps: Jumps,
    /// Block n is kept in slot n modulo their number.
    kept: Vec<Mutex<Kept>>,
}

/// `blob` itself when it is no zfile.
pub fn unwrap(blob: Arc<dyn Blob>) -> io::Result<Arc<dyn Blob>> {
    let Some(first) = first_block(&*blob)?.filter(Header::is_there) else {
        return Ok(blob);
    };
    let wrong = |what: &str, at: u64, why: &str| corrupt(format!("zfile {what} at {at}: {why}"));
    let mut header = Header::decode(&first, true).map_err(|why| wrong("header", 0, why))?;
    let file = blob.len()?;
    let Some(trailer_at) = file.checked_sub(BLOCK).filter(|at| *at >= BLOCK) else {
        return Err(wrong("trailer", file, "it is cut off"));
    };
    let mut place = ("header", 0);
    if !header.overwritten {
        place = ("trailer", trailer_at);
        let mut last = [0; BLOCK as usize];
        blob.read_at(&mut last, trailer_at)?;
        header = Header::decode(&last, false).map_err(|why| wrong(place.0, place.1, why))?;
    }
    let wrong = |why: &str| wrong(place.0, place.1, why);
    let blocks = header.original_size.div_ceil(u64::from(header.block_size));
    if blocks == 0 || blocks != header.index_size {
        return Err(wrong("length and number of blocks do not fit each other"));
    }
    let index_end = header
        .index_size
        .checked_mul(ENTRY)
        .and_then(|bytes| bytes.checked_add(header.index_offset));
    if header.index_offset < BLOCK || index_end.is_none_or(|end| end > trailer_at) {
        return Err(wrong("its jump table lies outside the file"));
    }
    let jumps = Jumps::read(&*blob, &header)?;
    let slots = (KEPT / header.block_size as usize).min(blocks as usize);
    Ok(Arc::new(Zfile {
        inner: blob,
        header,
        jumps,
        kept: (0..slots).map(|_| Mutex::default()).collect(),
    }))
}

impl Zfile {
    /// Content bytes of a block.
    fn content(&self, block: u64) -> Range<u64> {
        let size = u64::from(self.header.block_size);
        block * size..((block + 1) * size).min(self.header.original_size)
    }

    /// The last block, up to `last`, whose compressed bytes are read together with those of
    /// `first`.
    fn span(&self, first: u64, last: u64) -> u64 {
        let start = self.jumps.place(first as usize).start;
        let mut end = first;
        while end < last && self.jumps.place(end as usize + 1).end - start <= SPAN {
            end += 1;
        }
        end
    }

    /// Decompresses `raw`, a block as it is in the file, into exactly `target`.
    fn decompress(&self, block: u64, raw: &[u8], target: &mut [u8]) -> io::Result<()> {
        let wrong = |why: &str| {
            let at = self.jumps.place(block as usize).start;
            corrupt(format!("zfile block {block} at {at}: {why}"))
        };
        let mut compressed = raw;
        if self.header.verify {
            let (content, crc) = raw
                .split_last_chunk::<{ CRC as usize }>()
                .ok_or_else(|| wrong("too short"))?;
            if u32::from_le_bytes(*crc) != block_crc(content) {
                return Err(wrong("its CRC is wrong"));
            }
            compressed = content;
        }
        let length = match self.header.compression {
            Compression::Lz4 => lz4_flex::block::decompress_into(compressed, target).ok(),
            Compression::Zstd => zstd_into(compressed, target)?,
        };
        match length {
            Some(length) if length == target.len() => Ok(()),
            Some(_) => Err(wrong("its content has another length")),
            None => Err(wrong("it cannot be decompressed")),
        }
    }

    /// Copies `part` of a block's content, given in bytes of the whole content, from what is kept.
    fn copy_kept(&self, block: u64, part: Range<u64>, target: &mut [u8]) -> bool {
        let kept = self.kept[block as usize % self.kept.len()].lock();
        let Some((_, content)) = kept.as_ref().filter(|(number, _)| *number == block) else {
            return false;
        };
        let start = self.content(block).start;
        target
            .copy_from_slice(&content[(part.start - start) as usize..(part.end - start) as usize]);
        true
    }
}

/// None when it is not Zstandard, or longer than `target`.
fn zstd_into(compressed: &[u8], target: &mut [u8]) -> io::Result<Option<usize>> {
    thread_local! {
        // Its tables are far larger than a block.
        static ZSTD: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
    }
    ZSTD.with_borrow_mut(|kept| {
        let decompressor = match kept {
            Some(decompressor) => decompressor,
            None => kept.insert(zstd::bulk::Decompressor::new()?),
        };
        Ok(decompressor.decompress_to_buffer(compressed, target).ok())
    })
}

impl Blob for Zfile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        let end = end
            .filter(|end| *end <= self.header.original_size)
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        if buffer.is_empty() {
            return Ok(());
        }
        let size = u64::from(self.header.block_size);
        let last = (end - 1) / size;
        let place =
            |part: &Range<u64>| (part.start - offset) as usize..(part.end - offset) as usize;
        let wanted = |block: u64| {
            let content = self.content(block);
            content.start.max(offset)..content.end.min(end)
        };
        let mut block = offset / size;
        let mut raw = Vec::new();
        while block <= last {
            let part = wanted(block);
            if self.copy_kept(block, part.clone(), &mut buffer[place(&part)]) {
                block += 1;
                continue;
            }
            let until = self.span(block, last);
            let start = self.jumps.place(block as usize).start;
            raw.resize((self.jumps.place(until as usize).end - start) as usize, 0);
            self.inner.read_at(&mut raw, start)?;
            for number in block..=until {
                let within = self.jumps.place(number as usize);
                let raw = &raw[(within.start - start) as usize..(within.end - start) as usize];
                let (content, part) = (self.content(number), wanted(number));
                if part == content {
                    self.decompress(number, raw, &mut buffer[place(&part)])?;
                    continue;
                }
                let mut whole = vec![0; (content.end - content.start) as usize];
                self.decompress(number, raw, &mut whole)?;
                let from = (part.start - content.start) as usize;
                let target = &mut buffer[place(&part)];
                target.copy_from_slice(&whole[from..from + target.len()]);
                *self.kept[number as usize % self.kept.len()].lock() =
                    Some((number, whole.into_boxed_slice()));
            }
            block = until + 1;
        }
        Ok(())
    }

    fn write_at(&self, _data: &[u8], _offset: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.header.original_size)
    }

    fn set_len(&self, _length: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn write_out(&self, _offset: u64, _length: u64, _wait: bool) -> io::Result<()> {
        Err(read_only())
    }
}
