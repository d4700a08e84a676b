//! Every setting: its key, flag, default and meaning, each written once. Each group of sections has a file.
//!
//! The configuration takes its defaults from here, and the command line its help texts. A test generates
//! `docs/settings.md`. To add a setting, add it to its section in `settings/`, and read it in a function of
//! its section (`sections.rs`, `server.rs`, `cache.rs`). If it has `reloads`, `cli/serve/reload.rs` must
//! apply its new value.

mod network;
mod process;
mod recording;
mod serving;

pub(crate) use serving::MODEL_SECTION;

/// A key that can be configured.
#[derive(Debug)]
pub(crate) struct Setting {
    /// `section.key`.
    pub key: &'static str,
    /// The flag that sets it, or "".
    pub flag: &'static str,
    pub default: Fallback,
    /// One or two sentences in Markdown, without the period at the end.
    pub about: &'static str,
    /// Whether a running server applies a new value at SIGHUP.
    pub reloads: bool,
    /// Whether the file may have a list, or a table, instead of a text with commas.
    pub lists: bool,
}

/// The value of a setting that no layer gives.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fallback {
    /// This text, which is read like text that the user wrote.
    Text(&'static str),
    /// A computed default, or none. These words describe it.
    Words(&'static str),
}

/// The settings of one section of the file.
#[derive(Debug)]
pub(crate) struct Section {
    pub name: &'static str,
    #[cfg_attr(not(test), expect(dead_code))] // read only when docs/settings.md is generated
    pub about: &'static str,
    pub settings: &'static [Setting],
}

const fn setting(key: &'static str, default: Fallback, about: &'static str) -> Setting {
    Setting { key, flag: "", default, about, reloads: false, lists: false }
}

impl Setting {
    const fn flag(self, flag: &'static str) -> Self {
        Self { flag, ..self }
    }

    const fn reloads(self) -> Self {
        Self { reloads: true, ..self }
    }

    const fn lists(self) -> Self {
        Self { lists: true, ..self }
    }
}

/// The sections of the file, in the order of the documentation.
pub(crate) const SECTIONS: &[Section] = &[
    network::SERVER,
    network::TLS,
    network::AUTH,
    serving::MODELS,
    serving::BATCHER,
    serving::STORE,
    serving::CACHE,
    recording::TRACE,
    recording::LEARN,
    recording::VERSIONS,
    process::DEVICE,
    process::THREADS,
    process::LOG,
    process::OTEL,
];

/// Every setting.
pub(crate) fn all() -> impl Iterator<Item = &'static Setting> {
    SECTIONS.iter().flat_map(|section| section.settings)
}

/// The setting with this key.
pub(crate) fn find(key: &str) -> Option<&'static Setting> {
    all().find(|setting| setting.key == key)
}

/// The help text of the flag that sets this key: its meaning and default as plain text.
pub(crate) fn help(key: &str) -> String {
    let Some(setting) = find(key) else { return String::new() };
    let text = match setting.default {
        Fallback::Text(default) => format!("{} [default: {default}]", setting.about),
        Fallback::Words("none") => setting.about.to_owned(),
        Fallback::Words(words) => format!("{} [default: {words}]", setting.about),
    };
    text.replace('`', "")
}
