//! The three layers of the configuration (file, environment, flags): the text of each key, and its source.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::models::{common_key, key_of_variable, of_model};
use super::settings::{self, Fallback, SECTIONS};
use super::{ConfigError, Flags, SettingSource, unknown};

/// Every environment variable of a setting begins with this.
pub(super) const PREFIX: &str = "FLECHETTE_";

/// For every key that a layer gives: the text of the highest layer, with its source. Layers are added from
/// the lowest to the highest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layers {
    /// The flags of the third layer, which also name the file.
    pub(super) flags: Flags,
    pub(super) given: BTreeMap<String, Given>,
    /// `$XDG_CACHE_HOME` and `$HOME`, if they are absolute paths.
    pub(super) cache_home: Option<PathBuf>,
    pub(super) home: Option<PathBuf>,
    /// Unknown names, and values that cannot be read.
    pub(super) errors: Vec<ConfigError>,
    /// Keys without effect: one sentence each.
    pub(super) warnings: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Given {
    /// The full key.
    pub(super) key: String,
    pub(super) text: String,
    pub(super) source: SettingSource,
}

impl Layers {
    pub(crate) fn add_file(&mut self, path: &Path, text: &str) {
        let line = |at: usize| 1 + text.get(..at).unwrap_or_default().matches('\n').count();
        let table = match DeTable::parse(text) {
            Ok(table) => table.into_inner(),
            Err(error) => {
                let line = line(error.span().map_or(0, |span| span.start));
                let reason = error.message().to_owned();
                self.errors.push(ConfigError::Toml { path: path.to_owned(), line, reason });
                return;
            }
        };
        let source = |at| SettingSource::File { path: path.to_owned(), line: line(at) };
        self.add_table(&[], &table, &source);
    }

    /// Adds a table of the file. `path` is its name.
    fn add_table(&mut self, path: &[&str], table: &DeTable<'_>, source: &impl Fn(usize) -> SettingSource) {
        for (key, value) in table {
            let (path, source_of) = ([path, &[key.get_ref()]].concat(), source(key.span().start));
            let is_table = match path.as_slice() {
                [section] => SECTIONS.iter().any(|known| known.name == *section),
                ["models", _] | ["models", _, "batcher"] => true,
                _ => false,
            };
            let name = path.join(".");
            let is_value = of_model(&name).is_some_and(|(_, setting)| setting.lists);
            match value.get_ref() {
                DeValue::Table(table) if is_table => self.add_table(&path, table, source),
                DeValue::Table(_) if !is_value && (path.len() == 1 || path[0] == "models") => {
                    self.errors.push(unknown::section(source_of.to_string(), name));
                }
                value => self.add_value(name, value, source_of),
            }
        }
    }

    fn add_value(&mut self, name: String, value: &DeValue<'_>, source: SettingSource) {
        let known = settings::find(&name).or_else(|| of_model(&name).map(|(_, setting)| setting));
        let Some(setting) = known else {
            return self.errors.push(unknown::key(source.to_string(), name));
        };
        let text = plain(value).or_else(|| setting.lists.then(|| joined(value))?);
        let Some(text) = text else {
            let or_list = if setting.lists { ", or a list or table of them" } else { "" };
            let (expected, got) = (format!("a string or a number{or_list}"), value.type_str().to_owned());
            return self.errors.push(ConfigError::Value { key: name, source_of: source, expected, got });
        };
        self.give(name, text, source);
    }

    fn give(&mut self, key: String, text: String, source: SettingSource) {
        self.given.insert(key.clone(), Given { key, text, source });
    }

    pub(crate) fn add_environment(&mut self, environment: impl IntoIterator<Item = (OsString, OsString)>) {
        for (name, value) in environment {
            if name == "XDG_CACHE_HOME" || name == "HOME" {
                // The XDG specification: a path that is not absolute is ignored.
                let path = Some(PathBuf::from(&value)).filter(|path| path.is_absolute());
                *(if name == "HOME" { &mut self.home } else { &mut self.cache_home }) = path;
                continue;
            }
            let Some(name) = name.to_str().filter(|n| n.starts_with(PREFIX)) else { continue };
            let known = settings::all().map(|setting| setting.key).find(|key| variable(key) == name);
            let Some(key) = known.map(str::to_owned).or_else(|| key_of_variable(name)) else {
                self.errors.extend(unknown::environment_variable(name, &value));
                continue;
            };
            let source = SettingSource::Environment(name.to_owned());
            match value.into_string() {
                Ok(text) => self.give(key, text, source),
                Err(bytes) => {
                    let (expected, got) = ("UTF-8 text".to_owned(), format!("{bytes:?}"));
                    self.errors.push(ConfigError::Value { key, source_of: source, expected, got });
                }
            }
        }
    }

    pub(crate) fn add_flags(&mut self, flags: &Flags) {
        self.flags = flags.clone();
        for (key, text) in flags.given() {
            let flag = settings::find(key).map_or(key, |setting| setting.flag);
            self.give(key.to_owned(), text.to_owned(), SettingSource::Flag(flag));
        }
    }

    /// Takes the value that other layers give to a key.
    pub(super) fn take(&mut self, key: &str, from: &Self) {
        match from.given.get(key) {
            Some(given) => self.given.insert(key.to_owned(), given.clone()),
            None => self.given.remove(key),
        };
    }

    /// The layer that gives a key's value; `None` for a default.
    pub(crate) fn source(&self, key: &str) -> Option<&SettingSource> {
        self.given.get(key).map(|given| &given.source)
    }

    /// The text of a key from the highest layer that gives it, or its default text. A model's setting that is
    /// not given has the text of the common one.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        if let Some(given) = self.given.get(key) {
            return Some(given.text.trim());
        }
        let of_model = of_model(key).map(|(_, setting)| setting);
        if let Some(common) = of_model.and_then(common_key) {
            return self.text(common);
        }
        match of_model.or_else(|| settings::find(key))?.default {
            Fallback::Text(text) => Some(text),
            Fallback::Words(_) => None,
        }
    }
}

/// The text of a string or a number.
fn plain(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(digits) => {
            let number = i64::from_str_radix(digits.as_str(), digits.radix());
            Some(number.map_or_else(|_| digits.to_string(), |number| number.to_string()))
        }
        DeValue::Float(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The elements of a list, or the `key = value` of a table, with commas.
fn joined(value: &DeValue<'_>) -> Option<String> {
    let parts: Option<Vec<String>> = match value {
        DeValue::Array(list) => list.iter().map(|part| plain(part.get_ref())).collect(),
        DeValue::Table(table) => {
            let pairs = table.iter().map(|(key, value)| (key.get_ref(), plain(value.get_ref())));
            pairs.map(|(key, value)| Some(format!("{key} = {}", value?))).collect()
        }
        _ => None,
    };
    Some(parts?.join(", "))
}

/// The environment variable of a key.
pub(crate) fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_uppercase())
}
