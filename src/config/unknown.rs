//! Names that no setting has. They are errors, because a misspelt limit that is ignored is noticed too late.

use std::ffi::OsStr;

use super::layers::variable;
use super::settings::{self, SECTIONS};
use super::{ConfigError, models};

/// Variables that begin like those of settings, and that only tests read.
const TEST_VARIABLES: &str = "FLECHETTE_TEST_";
const OF_TESTS: [&str; 2] = ["FLECHETTE_DATA", "FLECHETTE_FUZZ_SECONDS"];

/// The error for a name of the file. `place` is the file with the line.
pub(crate) fn key(place: String, name: String) -> ConfigError {
    let keys = settings::all().map(|setting| setting.key.to_owned());
    let nearest = nearest(&name, keys.chain(models::keys_like(&name)));
    ConfigError::Unknown { place, what: "key", name, nearest }
}

/// The error for a section of the file.
pub(crate) fn section(place: String, name: String) -> ConfigError {
    let sections = SECTIONS.iter().map(|section| section.name.to_owned());
    let of_model = name.strip_prefix("models.").and_then(|name| name.rsplit_once('.'));
    let of_model = of_model.map(|(model, _)| format!("models.{model}.batcher"));
    let nearest = nearest(&name, sections.chain(of_model).chain(models::keys_like(&name)));
    ConfigError::Unknown { place, what: "section", name, nearest }
}

/// The error for an environment variable; `None` if it belongs to something else.
pub(crate) fn environment_variable(name: &str, value: &OsStr) -> Option<ConfigError> {
    if OF_TESTS.contains(&name) || name.starts_with(TEST_VARIABLES) || is_service_link(name, value) {
        return None;
    }
    let variables = settings::all().map(|setting| variable(setting.key));
    let nearest = nearest(name, variables.chain(models::variables_like(name)));
    let (place, name) = ("environment".to_owned(), name.to_owned());
    Some(ConfigError::Unknown { place, what: "variable", name, nearest })
}

/// Whether Kubernetes sets this variable in every pod beside a service whose name begins with "flechette":
/// `FLECHETTE_SERVICE_HOST`, `FLECHETTE_PORT_8001_TCP_ADDR` and so on. The value of one that ends with
/// `_PORT` is an address such as `tcp://10.0.0.1:8001`, and not the number of a port that somebody wants.
fn is_service_link(name: &str, value: &OsStr) -> bool {
    let is_address = value.to_str().is_some_and(|text| text.contains("://"));
    let of_port =
        |rest: &str| rest.strip_prefix('_').map_or(rest.is_empty() && is_address, begins_with_digit);
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.match_indices("_PORT").any(|(at, port)| of_port(&name[at + port.len()..]))
}

fn begins_with_digit(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
}

/// The known name with the fewest differing letters, unless a third of them differ.
fn nearest(name: &str, known: impl Iterator<Item = String>) -> Option<String> {
    let differing = |known: String| (strsim::damerau_levenshtein(name, &known), known);
    let (letters, known) = known.map(differing).min_by_key(|(letters, _)| *letters)?;
    (letters <= name.len() / 3).then_some(known)
}
