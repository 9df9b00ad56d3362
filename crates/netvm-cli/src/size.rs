//! Sizes as people write them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, written like `256M`, `1.5G`, `4GiB` or `4096`. Units are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

const UNITS: [(char, u32); 5] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50)];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(end);
        let written = unit.trim();
        let unit = written.to_ascii_uppercase();
        let unit = unit.strip_suffix("IB").or_else(|| unit.strip_suffix('B')).unwrap_or(&unit);
        let shift = if unit.is_empty() {
            0
        } else {
            let known = UNITS.iter().find(|(letter, _)| unit == letter.to_string());
            known.ok_or_else(|| format!("{written:?} is no unit; use K, M, G or T, as in 256M"))?.1
        };
        let number: f64 =
            number.parse().map_err(|_| format!("{text:?} is no size; write one like 256M or 1.5G"))?;
        let bytes = number * (1_u64 << shift) as f64;
        if bytes >= (1_u64 << 62) as f64 {
            return Err(format!("{text:?} is more than any machine has"));
        }
        Ok(Self(bytes as u64))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = UNITS.iter().rev().find(|(_, shift)| self.0 >= 1 << shift);
        match found {
            Some((letter, shift)) if self.0.is_multiple_of(1 << shift) => {
                write!(f, "{} {letter}iB", self.0 >> shift)
            }
            Some((letter, shift)) => write!(f, "{:.1} {letter}iB", self.0 as f64 / (1_u64 << shift) as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("4096", 4096),
            ("256M", 256 << 20),
            ("256mb", 256 << 20),
            ("1.5G", 3 << 29),
            ("4 GiB", 4 << 30),
            ("0", 0),
            ("2T", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "M", "-1", "1Q", "1.2.3G", "99999999P", "1e9", "256Mi5"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn names_a_unit_as_it_was_written() {
        let error = "1e9".parse::<Size>().unwrap_err();
        assert!(error.starts_with("\"e9\" is no unit"), "{error}");
    }

    #[test]
    fn writes_what_people_read() {
        assert_eq!(Size(256 << 20).to_string(), "256 MiB");
        assert_eq!(Size(3 << 29).to_string(), "1.5 GiB");
        assert_eq!(Size(17).to_string(), "17 B");
    }
}
