//! Opening a CUDA device on pretended machines (`pretend`): where its kernels come from, and every error.

use crate::pretend::Machine;
use crate::program::flechette;

#[test]
fn without_a_usable_gpu_serve_warns_with_auto_and_exits_with_cuda() {
    let cases = [
        (
            Machine::whole().with_setting("DRIVER", "12040"),
            "CUDA driver too old: expected at least 13.0, got 12.4",
        ),
        (
            Machine::whole().with_setting("COMPUTE", "61"),
            "compute 6.1, 1.0 GiB: expected compute 7.0 or newer",
        ),
        (Machine::whole().with_setting("DEVICES", "0"), "CUDA driver found, no device; check nvidia-smi"),
    ];
    // Without models, serve exits right after it chooses the device.
    let none = tempfile::tempdir().unwrap();
    for (machine, reason) in cases.into_iter().filter(|(machine, _)| machine.is_available()) {
        for (wanted, marker) in [("auto", " WARN "), ("cuda", "error: device.kind is cuda: expected ")] {
            let mut serve = flechette();
            serve.args(["serve", "--device", wanted, "--models"]).arg(none.path());
            let ended = machine.equip(&mut serve).output().unwrap();
            let text = String::from_utf8(ended.stderr).unwrap();
            assert_eq!(ended.status.code(), Some(2), "{text}");
            let line = text.lines().find(|line| line.contains(reason)).unwrap_or_else(|| panic!("{text}"));
            assert!(line.contains(marker), "{line}");
        }
    }
}

#[test]
fn serve_uses_a_usable_gpu_and_logs_its_name() {
    let machine = Machine::whole();
    if !machine.is_available() {
        return;
    }
    let none = tempfile::tempdir().unwrap();
    for wanted in ["auto", "cuda"] {
        let mut serve = flechette();
        serve.args(["serve", "--device", wanted, "--models"]).arg(none.path());
        serve.env("FLECHETTE_DEVICE_KERNEL_CACHE", "off");
        let text = String::from_utf8(machine.equip(&mut serve).output().unwrap().stderr).unwrap();
        let line = text.lines().find(|line| line.contains("Pretend GPU")).unwrap_or_else(|| panic!("{text}"));
        assert!(line.contains(" INFO ") && line.contains("kernels by "), "{line}");
    }
}
