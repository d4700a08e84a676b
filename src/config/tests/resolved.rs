//! Settings from flags, an environment and the text of a file, and the error of wrong ones.

use super::*;

pub(super) fn resolve(flags: &Flags, env: &[(&str, &str)], file: &str) -> Result<Config, ConfigError> {
    Config::resolve(flags, env.iter().map(|(k, v)| (k.into(), v.into())), Some(file))
}

pub(super) fn refusal(env: &[(&str, &str)], file: &str) -> String {
    resolve(&Flags::default(), env, file).unwrap_err().to_string()
}

pub(super) fn layers(file: &str) -> Layers {
    let mut layers = Layers::default();
    layers.add_file(Path::new("f"), file);
    layers
}
