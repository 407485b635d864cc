//! CRC-32C (Castagnoli) without inversions, by table.

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = index as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & 0u32.wrapping_sub(crc & 1));
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

/// The state after `bytes`, from `state` on. The usual CRC-32C is `!raw(!0, bytes)`.
pub fn raw(state: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(state, |crc, byte| {
        (crc >> 8) ^ TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize]
    })
}
