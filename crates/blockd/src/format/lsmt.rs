//! Layout of LSMT files: header and trailer blocks, index entries, the watermark. Arithmetic only,
//! no I/O.
//!
//! Source: docs/formats/lsmt.md.

use crate::format::crc;
use crate::uuid::Uuid;

pub const SECTOR: u64 = 512;
/// Length of the header and of the trailer, and where an upper's entries begin in its index file.
pub const BLOCK: u64 = 4096;
/// First sector that can hold data.
pub const FIRST_DATA_SECTOR: u64 = BLOCK / SECTOR;
/// Longest run of one entry, sectors.
pub const MAX_RUN: u64 = (1 << 14) - 1;
/// Logical sectors are below this.
pub const MAX_SECTOR: u64 = 1 << 50;
pub const MAX_VIRTUAL_SIZE: u64 = MAX_SECTOR * SECTOR;
/// Sealed layers in one stack; the tag of a merged entry names one of them.
pub const MAX_LAYERS: usize = 255;
pub const ENTRY: u64 = 16;
/// A compacted index is padded to a multiple of this many entries.
pub const COMPACT_ENTRIES: usize = 256;

const MAGIC0: [u8; 8] = *b"LSMT\x00\x01\x02\x00";
const MAGIC1: [u8; 16] = [
    0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c, 0xa2, 0xd2, 0xc8, 0xec, 0x4f, 0xcf, 0xae, 0x8a,
];
const STRUCT_SIZE: u32 = 390;

const HEADER: u32 = 1;
const DATA: u32 = 1 << 1;
const SEALED: u32 = 1 << 2;

/// What a header or trailer block is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Header of `upper.data`, and of a layer sealed in place.
    DataHeader,
    /// Header of `upper.index`.
    IndexHeader,
    /// Header of a compacted layer.
    SealedHeader,
    /// Trailer of any sealed layer.
    Trailer,
}

impl Role {
    const fn flags(self) -> u32 {
        match self {
            Self::DataHeader => HEADER | DATA,
            Self::IndexHeader => HEADER,
            Self::SealedHeader => HEADER | DATA | SEALED,
            Self::Trailer => DATA | SEALED,
        }
    }

    const fn of(flags: u32) -> Option<Self> {
        match flags & (HEADER | DATA | SEALED) {
            0b011 => Some(Self::DataHeader),
            0b001 => Some(Self::IndexHeader),
            0b111 => Some(Self::SealedHeader),
            0b110 => Some(Self::Trailer),
            _ => None,
        }
    }
}

/// The structure in a header or trailer block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub role: Role,
    /// Bytes.
    pub index_offset: u64,
    /// Entries.
    pub index_size: u64,
    /// Bytes.
    pub virtual_size: u64,
    pub uuid: Option<Uuid>,
    pub parent: Option<Uuid>,
    /// The user tag says that this index file has a watermark.
    pub marked: bool,
}

const MARKED: &[u8; 256] = &{
    let mut tag = [0; 256];
    (tag[0], tag[1], tag[2], tag[3]) = (b'a', b'e', b'n', b'v');
    tag
};

impl Header {
    /// Where the virtual size is, for changing it alone.
    pub const VIRTUAL_SIZE_OFFSET: u64 = 48;

    pub fn encode(&self) -> [u8; BLOCK as usize] {
        let mut block = [0; BLOCK as usize];
        block[0..8].copy_from_slice(&MAGIC0);
        block[8..24].copy_from_slice(&MAGIC1);
        block[24..28].copy_from_slice(&STRUCT_SIZE.to_le_bytes());
        block[28..32].copy_from_slice(&self.role.flags().to_le_bytes());
        block[32..40].copy_from_slice(&self.index_offset.to_le_bytes());
        block[40..48].copy_from_slice(&self.index_size.to_le_bytes());
        block[48..56].copy_from_slice(&self.virtual_size.to_le_bytes());
        for (at, uuid) in [(56, self.uuid), (93, self.parent)] {
            if let Some(uuid) = uuid {
                block[at..at + 36].copy_from_slice(uuid.to_string().as_bytes());
            }
        }
        block[132] = 1;
        block[133] = 1;
        if self.marked {
            block[134..390].copy_from_slice(MARKED);
        }
        block
    }

    /// None when the magics or flags are not those of this format. Offsets and sizes are not judged
    /// here.
    pub fn decode(block: &[u8; BLOCK as usize]) -> Option<Self> {
        if block[0..8] != MAGIC0 || block[8..24] != MAGIC1 {
            return None;
        }
        Some(Self {
            role: Role::of(u32_at(block, 28))?,
            index_offset: u64_at(block, 32),
            index_size: u64_at(block, 40),
            virtual_size: u64_at(block, 48),
            uuid: Uuid::parse(&block[56..92]),
            parent: Uuid::parse(&block[93..129]),
            marked: block[134..390] == *MARKED,
        })
    }
}

/// One index entry in its 16-byte form, which is also the form of indices in memory. Its length is
/// 1 to [`MAX_RUN`] sectors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    low: u64,
    high: u64,
}

const LENGTH_SHIFT: u32 = 50;
const ZEROED: u64 = 1 << 55;
const PHYSICAL: u64 = ZEROED - 1;
const TAG_SHIFT: u32 = 56;

impl Entry {
    /// Padding of compacted indices: no entry at all.
    pub const PADDING: Self = Self {
        low: MAX_SECTOR - 1,
        high: 0,
    };

    /// `length` sectors from `sector` on lie at `physical`. Fields out of range are cut to their
    /// bits.
    pub const fn data(sector: u64, length: u64, physical: u64) -> Self {
        Self {
            low: (sector & (MAX_SECTOR - 1)) | ((length & MAX_RUN) << LENGTH_SHIFT),
            high: physical & PHYSICAL,
        }
    }

    /// `length` sectors from `sector` on read as zeros.
    pub const fn zeroed(sector: u64, length: u64) -> Self {
        let entry = Self::data(sector, length, FIRST_DATA_SECTOR);
        Self {
            low: entry.low,
            high: entry.high | ZEROED,
        }
    }

    pub fn from_bytes(bytes: &[u8; ENTRY as usize]) -> Self {
        Self {
            low: u64_at(bytes, 0),
            high: u64_at(bytes, 8),
        }
    }

    pub fn to_bytes(self) -> [u8; ENTRY as usize] {
        let mut bytes = [0; ENTRY as usize];
        bytes[0..8].copy_from_slice(&self.low.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.high.to_le_bytes());
        bytes
    }

    pub const fn sector(self) -> u64 {
        self.low & (MAX_SECTOR - 1)
    }

    /// Sectors; 0 only in padding.
    pub const fn length(self) -> u64 {
        self.low >> LENGTH_SHIFT
    }

    /// First logical sector after the entry.
    pub const fn end(self) -> u64 {
        self.sector() + self.length()
    }

    pub const fn physical(self) -> u64 {
        self.high & PHYSICAL
    }

    pub const fn is_zeroed(self) -> bool {
        self.high & ZEROED != 0
    }

    pub const fn tag(self) -> u8 {
        (self.high >> TAG_SHIFT) as u8
    }

    pub const fn with_tag(self, tag: u8) -> Self {
        Self {
            low: self.low,
            high: (self.high & (ZEROED | PHYSICAL)) | ((tag as u64) << TAG_SHIFT),
        }
    }

    /// The part from logical sector `start` to `end`, which must lie within the entry and not be
    /// empty.
    pub const fn slice(self, start: u64, end: u64) -> Self {
        debug_assert!(self.sector() <= start && start < end && end <= self.end());
        let skip = if self.is_zeroed() {
            0
        } else {
            start - self.sector()
        };
        Self {
            low: start | ((end - start) << LENGTH_SHIFT),
            high: self.high + skip,
        }
    }

    /// `self` and `next` as one entry, when they are neighbours in logical and physical place.
    pub const fn joined(self, next: Self) -> Option<Self> {
        let follows = self.end() == next.sector()
            && self.tag() == next.tag()
            && self.is_zeroed() == next.is_zeroed()
            && (self.is_zeroed() || self.physical() + self.length() == next.physical())
            && self.length() + next.length() <= MAX_RUN;
        if !follows {
            return None;
        }
        let length = self.length() + next.length();
        Some(Self {
            low: self.sector() | (length << LENGTH_SHIFT),
            high: self.high,
        })
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}+{}", self.sector(), self.length())?;
        if self.is_zeroed() {
            write!(f, " zeroed")?
        } else {
            write!(f, " at {}", self.physical())?
        }
        write!(f, " tag {}", self.tag())
    }
}

/// What a completed flush covers, kept in the header block of `upper.index`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermark {
    pub entries: u64,
    pub boot_id: [u8; 16],
}

impl Watermark {
    pub const OFFSET: u64 = 512;
    const MAGIC: [u8; 8] = *b"AENVMARK";

    /// One sector.
    pub fn encode(&self) -> [u8; SECTOR as usize] {
        let mut sector = [0; SECTOR as usize];
        sector[0..8].copy_from_slice(&Self::MAGIC);
        sector[8..16].copy_from_slice(&self.entries.to_le_bytes());
        sector[16..32].copy_from_slice(&self.boot_id);
        let crc = crc32c(&sector[0..32]);
        sector[32..36].copy_from_slice(&crc.to_le_bytes());
        sector
    }

    /// From the header block of an index file; None when there is none.
    pub fn decode(block: &[u8; BLOCK as usize]) -> Option<Self> {
        let sector = &block[Self::OFFSET as usize..(Self::OFFSET + SECTOR) as usize];
        if sector[0..8] != Self::MAGIC || u32_at(sector, 32) != crc32c(&sector[0..32]) {
            return None;
        }
        let mut boot_id = [0; 16];
        boot_id.copy_from_slice(&sector[16..32]);
        Some(Self {
            entries: u64_at(sector, 8),
            boot_id,
        })
    }
}

/// CRC-32C with the usual inversions.
fn crc32c(bytes: &[u8]) -> u32 {
    !crc::raw(!0, bytes)
}

pub const fn round_up(value: u64, multiple: u64) -> u64 {
    value.div_ceil(multiple) * multiple
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_of_the_check_string() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn padding_is_the_bytes_other_writers_use() {
        let mut expected = [0; 16];
        expected[0..8].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x03, 0x00]);
        assert_eq!(Entry::PADDING.to_bytes(), expected);
        assert_eq!(Entry::PADDING.length(), 0);
    }

    #[test]
    fn entries_slice_and_join() {
        let entry = Entry::data(100, 50, 8).with_tag(3);
        let (left, right) = (entry.slice(100, 120), entry.slice(120, 150));
        assert_eq!(
            (
                right.sector(),
                right.length(),
                right.physical(),
                right.tag()
            ),
            (120, 30, 28, 3)
        );
        assert_eq!(left.joined(right), Some(entry));
        assert_eq!(right.joined(left), None);
        let zeroed = Entry::zeroed(0, 10);
        assert_eq!(zeroed.slice(0, 4).joined(zeroed.slice(4, 10)), Some(zeroed));
        assert_eq!(
            Entry::data(0, MAX_RUN, 8).joined(Entry::data(MAX_RUN, 1, 8 + MAX_RUN)),
            None
        );
    }

    #[test]
    fn a_mark_survives_its_encoding_and_nothing_else() {
        let mark = Watermark {
            entries: 7,
            boot_id: [9; 16],
        };
        let mut block = [0; BLOCK as usize];
        assert_eq!(Watermark::decode(&block), None);
        block[512..1024].copy_from_slice(&mark.encode());
        assert_eq!(Watermark::decode(&block), Some(mark));
        block[520] ^= 1;
        assert_eq!(Watermark::decode(&block), None);
    }
}
