//! Version 4 uuids and other random names.

use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Uuid([u8; 16]);

impl Uuid {
    /// A random (version 4) uuid.
    pub fn random() -> Self {
        let mut bytes = random_bytes();
        bytes[6] = (bytes[6] & 0x0f) | 0x40;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        Self(bytes)
    }

    /// The 36-character form. None for anything else and for the nil uuid, which says "none" in
    /// layers of other tools.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let hyphens = [8, 13, 18, 23];
        if text.len() != 36
            || !text.is_ascii()
            || hyphens.iter().any(|&at| text.as_bytes()[at] != b'-')
        {
            return None;
        }
        let digits: String = text.chars().filter(|&c| c != '-').collect();
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        let value = u128::from_str_radix(&digits, 16)
            .ok()
            .filter(|_| digits.len() == 32)?;
        (value != 0).then(|| Self(value.to_be_bytes()))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if [4, 6, 8, 10].contains(&index) {
                write!(f, "-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// 128 bits as 32 hex digits.
pub fn random_name() -> String {
    random_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    // SAFETY: the pointer and length are those of `bytes`. Up to 256 bytes come whole, once the
    // kernel's pool is seeded.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(got, 16, "getrandom(2) always gives 16 bytes");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips() {
        let uuid = Uuid::random();
        assert_eq!(Uuid::parse(uuid.to_string().as_bytes()), Some(uuid));
        assert_eq!(uuid.to_string().as_bytes()[14], b'4');
        assert_eq!(Uuid::parse(b"00000000-0000-0000-0000-000000000000"), None);
        assert_eq!(Uuid::parse(b"+1111111-1111-4111-8111-111111111111"), None);
        assert_eq!(Uuid::parse(&[0; 36]), None);
    }
}
