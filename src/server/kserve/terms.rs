//! The parameters of a request that say when it is computed: `timeout` and `priority`, as Triton has them.

use std::time::{Duration, Instant};

use crate::batcher::{Priority, Terms};
use crate::server::convert::clip;
use crate::server::gate::Call;
use crate::server::inference::ModelInferRequest;
use crate::server::inference::infer_parameter::ParameterChoice;
use crate::server::status::CallError;

/// The terms of a request.
///
/// # Errors
/// [`CallError::Priority`].
pub(crate) fn terms(
    request: &ModelInferRequest,
    started: Instant,
    call: Option<&Call>,
) -> Result<Terms, CallError> {
    let deadline = timeout(request).and_then(|timeout| started.checked_add(timeout));
    let deadline = call.and_then(|call| call.deadline).into_iter().chain(deadline).min();
    Ok(Terms { deadline, priority: priority(request)? })
}

fn parameter<'a>(request: &'a ModelInferRequest, name: &str) -> Option<&'a ParameterChoice> {
    request.parameters.get(name).and_then(|parameter| parameter.parameter_choice.as_ref())
}

/// The longest wait, in microseconds. Clients send 0 for no limit.
fn timeout(request: &ModelInferRequest) -> Option<Duration> {
    let micros = match parameter(request, "timeout")? {
        ParameterChoice::Int64Param(micros) => u64::try_from(*micros).ok()?,
        ParameterChoice::Uint64Param(micros) => *micros,
        _ => return None,
    };
    (micros > 0).then(|| Duration::from_micros(micros))
}

/// Lower numbers are more urgent, and clients send 0 for the default.
///
/// # Errors
/// [`CallError::Priority`].
pub(crate) fn priority(request: &ModelInferRequest) -> Result<Priority, CallError> {
    let refused = |got: String| Err(CallError::Priority { got: clip(got) });
    match parameter(request, "priority") {
        None | Some(ParameterChoice::Int64Param(0 | 2) | ParameterChoice::Uint64Param(0 | 2)) => {
            Ok(Priority::Normal)
        }
        Some(ParameterChoice::Int64Param(1) | ParameterChoice::Uint64Param(1)) => Ok(Priority::High),
        Some(ParameterChoice::Int64Param(3..) | ParameterChoice::Uint64Param(_)) => Ok(Priority::Low),
        Some(ParameterChoice::Int64Param(number)) => refused(number.to_string()),
        Some(ParameterChoice::BoolParam(value)) => refused(value.to_string()),
        Some(ParameterChoice::StringParam(text)) => refused(format!("{text:?}")),
        Some(ParameterChoice::DoubleParam(number)) => refused(number.to_string()),
    }
}
