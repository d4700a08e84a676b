//! Value parsers of flags. Their errors say what is accepted.

use std::net::SocketAddr;
use std::time::Duration;

use crate::config::{BYTES_FORM, parse_address, parse_bytes};

/// Parses a whole number from `least` to `most`.
pub(crate) fn whole<T: TryFrom<u64>>(
    least: u64,
    most: u64,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        let value = number.and_then(|number| T::try_from(number).ok());
        value.ok_or_else(|| match most {
            u64::MAX => format!("expected a whole number from {least}, digits only"),
            most => format!("expected a whole number from {least} to {most}, digits only"),
        })
    }
}

/// Parses an address to listen on; a name is resolved.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    parse_address(text).map_err(|form| format!("expected {form}"))
}

/// Parses a number from `least` to `most`.
pub(crate) fn number(
    least: f64,
    most: f64,
) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("expected a number from {least} to {most}"))
    }
}

/// Parses a time from `least` to `most` seconds, such as `20ms`.
pub(crate) fn seconds(
    least: f64,
    most: f64,
) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    move |text| {
        let time = seconds_of(text).filter(|time| (least..=most).contains(time));
        time.map(Duration::from_secs_f64)
            .ok_or_else(|| format!("expected a time from {least}s to {most}s, such as 20ms or 1.5s"))
    }
}

/// The seconds of a time such as `20ms` or `1.5s`.
pub(crate) fn seconds_of(text: &str) -> Option<f64> {
    let number = |unit: &str| text.strip_suffix(unit)?.trim().parse::<f64>().ok();
    number("ms").map(|ms| ms / 1000.0).or_else(|| number("s"))
}

/// Parses a positive number.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "expected a positive number, such as 0.02".to_owned())
}

/// Parses a number of bytes, such as `64Mi`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| format!("expected {BYTES_FORM}"))
}

/// Parses a positive number with the units of bytes, such as `1M`.
pub(crate) fn positive_count(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().or_else(|| parse_bytes(text).map(|number| number as f64));
    let number = number.filter(|number: &f64| (0.001..=1e18).contains(number));
    number
        .ok_or_else(|| "expected a number from 0.001 to 1e18, plain or with the unit K, M, G or T".to_owned())
}
