//! From the text of a key to a value: numbers, bytes, addresses, choices.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use super::layers::Layers;
use super::{ConfigError, SettingSource};

pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;

impl Layers {
    /// The value of a key that has no default text: `None` if no layer gives it.
    pub(crate) fn optional<'k, T>(
        &self,
        key: &'k str,
        read: impl FnOnce(&'k str) -> Result<T, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        self.text(key).is_some().then(|| read(key)).transpose()
    }

    /// Reads a key that is given or has a default text. `read` returns `None` if the text is not what
    /// `expected` describes.
    pub(super) fn parse<T>(
        &self,
        key: &str,
        expected: impl FnOnce() -> String,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, ConfigError> {
        let text = self.text(key);
        text.and_then(read).ok_or_else(|| ConfigError::Value {
            key: self.given.get(key).map_or(key, |given| &given.key).to_owned(),
            source_of: self.source(key).cloned().unwrap_or(SettingSource::Default),
            expected: expected(),
            got: text.map_or("nothing".to_owned(), |text| format!("{text:?}")),
        })
    }

    pub(crate) fn whole(&self, key: &'static str, least: u64, most: u64) -> Result<u64, ConfigError> {
        let expected = || format!("a whole number from {least} to {most}");
        self.parse(key, expected, |text| {
            text.replace('_', "").parse().ok().filter(|n| (least..=most).contains(n))
        })
    }

    pub(crate) fn bytes(&self, key: &'static str, least: u64, most: u64) -> Result<u64, ConfigError> {
        let expected = || format!("{BYTES_FORM}, from {least} to {most}");
        self.parse(key, expected, |text| parse_bytes(text).filter(|n| (least..=most).contains(n)))
    }

    /// Bytes that must hold the largest message: a lower limit would refuse that message for ever.
    pub(super) fn room(&self, key: &'static str, least: u64, max_bytes: u64) -> Result<u64, ConfigError> {
        let expected = || {
            format!(
                "{BYTES_FORM}, at least {least}, which a message of server.max_bytes = {max_bytes} may take"
            )
        };
        self.parse(key, expected, |text| parse_bytes(text).filter(|n| (least..=1024 * GIB).contains(n)))
    }

    /// A number from 0 to 1.
    pub(crate) fn fraction(&self, key: &str) -> Result<f64, ConfigError> {
        let expected = || "a number from 0 to 1".to_owned();
        self.parse(key, expected, |text| text.parse().ok().filter(|f| (0.0..=1.0).contains(f)))
    }

    /// A number above 0 and at most `most`.
    pub(crate) fn share(&self, key: &'static str, most: f64) -> Result<f64, ConfigError> {
        let expected = || format!("a number above 0 and at most {most}");
        self.parse(key, expected, |text| text.parse().ok().filter(|f| *f > 0.0 && *f <= most))
    }

    /// The path of a file or a directory.
    pub(super) fn path(&self, key: &'static str) -> Result<Option<PathBuf>, ConfigError> {
        let read = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
        self.optional(key, |key| self.parse(key, || "a path".to_owned(), read))
    }

    pub(super) fn address(&self, key: &'static str) -> Result<SocketAddr, ConfigError> {
        let (found, form) = match self.text(key).map(parse_address) {
            Some(Ok(address)) => (Some(address), String::new()),
            Some(Err(form)) => (None, form),
            None => (None, ADDRESS_FORM.to_owned()),
        };
        self.parse(key, || form, |_| found)
    }

    /// An address that can be listened on besides another one.
    pub(super) fn address_besides(
        &self,
        key: &'static str,
        other_key: &'static str,
        other: SocketAddr,
    ) -> Result<SocketAddr, ConfigError> {
        let address = self.address(key)?;
        // An IPv6 socket for all addresses takes those of IPv4 too.
        let covers = |a: SocketAddr, b: SocketAddr| {
            a.ip() == b.ip() || a.ip().is_unspecified() && (a.is_ipv6() || b.is_ipv4())
        };
        let is_taken = address.port() == other.port()
            && address.port() != 0
            && (covers(address, other) || covers(other, address));
        self.parse(key, || format!("another address than {other_key}"), |_| (!is_taken).then_some(address))
    }

    pub(crate) fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Result<T, ConfigError> {
        let expected = || choices.iter().map(|c| c.0).collect::<Vec<_>>().join(", ");
        self.parse(key, expected, |text| choices.iter().find(|c| c.0 == text).map(|c| c.1))
    }

    /// A number of threads; 0 becomes the number of cores.
    pub(super) fn threads_of(&self, key: &'static str, most: u64) -> Result<usize, ConfigError> {
        Ok(match self.whole(key, 0, most)? {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            count => count as usize,
        })
    }
}

/// The words of error messages for an address.
const ADDRESS_FORM: &str = "host:port, such as 127.0.0.1:8001";

/// Reads an address to listen on; a name is resolved. The error is what was expected, and why the name has no
/// address.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    match text.to_socket_addrs() {
        Ok(mut found) => found.next().ok_or_else(|| ADDRESS_FORM.to_owned()),
        Err(error) => Err(format!("{ADDRESS_FORM} ({error})")),
    }
}

/// The words of error messages for a value in bytes.
pub(crate) const BYTES_FORM: &str = "a number of bytes, plain or with the unit K, M, G, T, Ki, Mi, Gi or Ti";

/// Reads bytes: `512`, `64K` (1,000s), `16Mi` (1,024s), `1.5G`, each with or without a `B` at the end.
#[must_use]
pub(crate) fn parse_bytes(text: &str) -> Option<u64> {
    const UNITS: &[(&str, u64)] = &[
        ("Ki", 1 << 10),
        ("Mi", MIB),
        ("Gi", GIB),
        ("Ti", 1 << 40),
        ("K", 1_000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
    ];
    let text = text.strip_suffix('B').unwrap_or(text);
    let Some((number, unit)) = UNITS.iter().find_map(|(u, n)| text.strip_suffix(u).map(|t| (t, *n))) else {
        return text.replace('_', "").parse().ok();
    };
    let bytes = number.trim().parse::<f64>().ok()? * unit as f64;
    // No machine has 2^63 bytes, and f64 would round such numbers.
    (0.0..9.2e18).contains(&bytes).then_some(bytes.round() as u64)
}
