//! Amounts of memory in words.

/// Bytes in a binary unit.
pub(crate) fn bytes(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut scaled = bytes;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{scaled:.0} B") } else { format!("{scaled:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_in_the_largest_unit_of_which_there_is_one() {
        assert_eq!(bytes(1000.0), "1000 B");
        assert_eq!(bytes(84.0 * 1024.0 * 1024.0), "84.0 MiB");
        assert_eq!(bytes(23_432_400_896.0), "21.8 GiB");
    }
}
