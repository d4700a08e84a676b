//! The life of `serve`: what it answers before its models are loaded, models that cannot be loaded, and its
//! end.

mod ending;
mod loading;
mod readiness;
mod refused_models;
mod settings;
