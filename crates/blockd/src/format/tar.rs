//! Layout of the tar wrapping: header blocks and where the payload is. No I/O.
//!
//! Source: docs/formats/tar.md.

pub const BLOCK: usize = 512;
/// Where the payload begins behind a pax header.
pub const PAX_PAYLOAD: u64 = 1536;

type Block = [u8; BLOCK];

/// Whether a file that begins so is a tar archive.
pub fn is_there(block: &Block) -> bool {
    block[257..265] == *b"ustar\x0000" && octal(&block[148..156]) == Some(checksum(block))
}

pub const fn is_pax(block: &Block) -> bool {
    block[156] == b'x'
}

/// The size field of a member's header.
pub fn size(block: &Block) -> Option<u64> {
    octal(&block[124..136])
}

/// The value of the record `size` among `records`, the bytes that the pax header's size counts;
/// None when the records are malformed.
pub fn pax_size(records: &[u8]) -> Option<Option<u64>> {
    let mut rest = records;
    let mut size = None;
    while !rest.is_empty() {
        let space = rest.iter().position(|byte| *byte == b' ')?;
        let length: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
        let record = rest.get(space + 1..length)?.strip_suffix(b"\n")?;
        if let Some(value) = record.strip_prefix(b"size=") {
            size = Some(std::str::from_utf8(value).ok()?.parse().ok()?);
        }
        rest = &rest[length..];
    }
    Some(size)
}

fn checksum(block: &Block) -> u64 {
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    sum(&block[..148]) + 8 * u64::from(b' ') + sum(&block[156..])
}

/// Octal digits up to the first NUL or space.
fn octal(field: &[u8]) -> Option<u64> {
    let end = field.iter().position(|byte| matches!(byte, 0 | b' '));
    let digits = &field[..end.unwrap_or(field.len())];
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()
}
