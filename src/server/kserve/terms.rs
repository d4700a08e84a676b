//! The parameters of a request that say when it is computed, `timeout` and `priority` (as in Triton), and by
//! which version: `label`.

use std::time::Duration;

use super::InferHead;
use crate::batcher::Priority;
use crate::server::convert::clip;
use crate::server::inference::infer_parameter::ParameterChoice;
use crate::server::status::CallError;

/// Most characters of a text in an error, before it is shortened.
const SHOWN: usize = 100;

fn parameter<'a>(request: &'a InferHead, name: &str) -> Option<&'a ParameterChoice> {
    request.parameters.get(name).and_then(|parameter| parameter.parameter_choice.as_ref())
}

/// The time of the request from its arrival, in microseconds. Clients send 0 for no limit. `None` also for a
/// parameter that [`check_timeout`] refuses.
pub(crate) fn timeout(request: &InferHead) -> Option<Duration> {
    let micros = match parameter(request, "timeout")? {
        ParameterChoice::Int64Param(micros) => u64::try_from(*micros).ok()?,
        ParameterChoice::Uint64Param(micros) => *micros,
        _ => return None,
    };
    (micros > 0).then(|| Duration::from_micros(micros))
}

/// # Errors
/// [`CallError::Timeout`]: a request whose limit is not understood would have none.
pub(crate) fn check_timeout(request: &InferHead) -> Result<(), CallError> {
    match parameter(request, "timeout") {
        None | Some(ParameterChoice::Int64Param(0..) | ParameterChoice::Uint64Param(_)) => Ok(()),
        Some(other) => Err(CallError::Timeout { got: shown(other) }),
    }
}

/// Lower numbers are more urgent, and clients send 0 for the default.
///
/// # Errors
/// [`CallError::Priority`].
pub(crate) fn priority(request: &InferHead) -> Result<Priority, CallError> {
    match parameter(request, "priority") {
        None | Some(ParameterChoice::Int64Param(0 | 2) | ParameterChoice::Uint64Param(0 | 2)) => {
            Ok(Priority::Normal)
        }
        Some(ParameterChoice::Int64Param(1) | ParameterChoice::Uint64Param(1)) => Ok(Priority::High),
        Some(ParameterChoice::Int64Param(3..) | ParameterChoice::Uint64Param(_)) => Ok(Priority::Low),
        Some(other) => Err(CallError::Priority { got: shown(other) }),
    }
}

/// A value in an error.
fn shown(value: &ParameterChoice) -> String {
    clip(match value {
        ParameterChoice::Int64Param(number) => number.to_string(),
        ParameterChoice::Uint64Param(number) => number.to_string(),
        ParameterChoice::BoolParam(value) => value.to_string(),
        // The whole text may be many times as long when it is escaped.
        ParameterChoice::StringParam(text) => {
            format!("{:?}", text.chars().take(SHOWN).collect::<String>())
        }
        ParameterChoice::DoubleParam(number) => number.to_string(),
    })
}

/// The label that the request names; empty: none.
///
/// # Errors
/// [`CallError::LabelParameter`].
pub(crate) fn label(request: &InferHead) -> Result<String, CallError> {
    match parameter(request, "label") {
        None => Ok(String::new()),
        Some(ParameterChoice::StringParam(label)) => Ok(label.clone()),
        Some(_) => Err(CallError::LabelParameter),
    }
}
