//! Layout of zfile: header and trailer, limits. Arithmetic only, no I/O.
//!
//! Source: docs/formats/zfile.md.

use crate::format::crc;

/// Length of header and of trailer.
pub const BLOCK: u64 = 512;
pub const ENTRY: u64 = 4;
pub const CRC: u32 = 4;
pub const MAX_BLOCK_SIZE: u32 = 1 << 16;
const MIN_BLOCK_SIZE: u32 = 512;
/// Start of a block's CRC.
const BLOCK_CRC_START: u32 = 100_007;

const MAGIC: [u8; 24] = *b"ZFile\x00\x01\x00tuji.yyf@Alibaba";
const HEADER: u64 = 1;
const DATA: u64 = 1 << 1;
const OVERWRITTEN: u64 = 1 << 3;
const DIGESTS: u64 = 1 << 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    Lz4,
    Zstd,
}

/// The structure in header and trailer, its fields in range each by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    is_header: bool,
    /// The header holds everything, the trailer does not count.
    pub overwritten: bool,
    pub index_offset: u64,
    /// Blocks.
    pub index_size: u64,
    /// Bytes of content.
    pub original_size: u64,
    /// None when nothing was recorded.
    pub index_crc: Option<u32>,
    pub block_size: u32,
    pub compression: Compression,
    /// Blocks are followed by their CRC.
    pub verify: bool,
}

impl Header {
    /// Whether a file that begins so is a zfile.
    pub fn is_there(block: &[u8; BLOCK as usize]) -> bool {
        block[0..24] == MAGIC
    }

    /// `header`: which of the two it must be.
    ///
    /// # Errors
    /// What is wrong.
    pub fn decode(block: &[u8; BLOCK as usize], header: bool) -> Result<Self, &'static str> {
        if !Self::is_there(block) {
            return Err("no zfile magic");
        }
        let flags = u64_at(block, 32);
        if (flags & HEADER != 0) != header || flags & DATA == 0 {
            return Err("wrong flags");
        }
        let mut undigested = *block;
        undigested[28..32].fill(0);
        if flags & DIGESTS != 0 && u32_at(block, 28) != crc::raw(0, &undigested) {
            return Err("its digest is wrong");
        }
        let block_size = u32_at(block, 72);
        if !block_size.is_power_of_two() || !(MIN_BLOCK_SIZE..=MAX_BLOCK_SIZE).contains(&block_size)
        {
            return Err("impossible block size");
        }
        if block[78] != 0 || u32_at(block, 84) != 0 {
            return Err("it uses a dictionary, which is not supported");
        }
        let compression = match block[76] {
            1 => Compression::Lz4,
            2 => Compression::Zstd,
            _ => return Err("unknown compression"),
        };
        Ok(Self {
            is_header: header,
            overwritten: flags & OVERWRITTEN != 0,
            index_offset: u64_at(block, 40),
            index_size: u64_at(block, 48),
            original_size: u64_at(block, 56),
            index_crc: (flags & DIGESTS != 0).then(|| u32_at(block, 64)),
            block_size,
            compression,
            verify: block[88] != 0,
        })
    }

    /// Lengths that a block can have in the file.
    pub const fn block_lengths(&self) -> std::ops::RangeInclusive<u32> {
        let crc = if self.verify { CRC } else { 0 };
        crc + 1..=self.block_size + self.block_size / 128 + 512
    }
}

/// Making them: nothing but tests writes zfiles yet.
#[cfg(test)]
impl Header {
    /// A header, still without lengths.
    pub const fn new(block_size: u32, compression: Compression) -> Self {
        Self {
            is_header: true,
            overwritten: false,
            index_offset: 0,
            index_size: 0,
            original_size: 0,
            index_crc: Some(0),
            block_size,
            compression,
            verify: true,
        }
    }

    pub const fn trailer(self) -> Self {
        Self {
            is_header: false,
            ..self
        }
    }

    pub fn encode(&self) -> [u8; BLOCK as usize] {
        let mut block = [0; BLOCK as usize];
        let role = if self.is_header { HEADER } else { 1 << 2 };
        let flags = role | DATA | DIGESTS;
        block[0..24].copy_from_slice(&MAGIC);
        block[24..28].copy_from_slice(&96u32.to_le_bytes());
        block[32..40].copy_from_slice(&flags.to_le_bytes());
        block[40..48].copy_from_slice(&self.index_offset.to_le_bytes());
        block[48..56].copy_from_slice(&self.index_size.to_le_bytes());
        block[56..64].copy_from_slice(&self.original_size.to_le_bytes());
        block[64..68].copy_from_slice(&self.index_crc.unwrap_or(0).to_le_bytes());
        block[72..76].copy_from_slice(&self.block_size.to_le_bytes());
        block[76] = match self.compression {
            Compression::Lz4 => 1,
            Compression::Zstd => 2,
        };
        block[88] = u8::from(self.verify);
        let digest = crc::raw(0, &block);
        block[28..32].copy_from_slice(&digest.to_le_bytes());
        block
    }
}

pub fn block_crc(compressed: &[u8]) -> u32 {
    crc::raw(BLOCK_CRC_START, compressed)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
