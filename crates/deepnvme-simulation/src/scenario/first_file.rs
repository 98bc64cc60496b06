//! Writes the file that a scenario begins with.

use deepnvme_file::{Replacement, Target};
use deepnvme_io::{DirectMode, Durability, WriteMode, WriteOptions};

use super::context::{Context, SETUP_ENGINE, SETUP_PROCESS};
use super::payload;

/// Writes a file in a process of its own, in which nothing fails.
pub(super) fn write(context: &Context, target: &Target, bytes: Vec<u8>) {
    let failing = std::mem::take(&mut context.world.state().setup.failing_per_mille);
    let target = target.clone();
    let process = context.process(SETUP_PROCESS, move |context| {
        let written = context.engine(SETUP_ENGINE).and_then(|engine| {
            let replacement = Replacement::new(&target)?;
            let file = replacement.open(DirectMode::Preferred)?;
            let options = WriteOptions { durability: Durability::Full, mode: WriteMode::WholeFile };
            engine.write(&file, 0, payload::region_with(&bytes).region(), options)?.wait().1?;
            replacement.commit(true)
        });
        if let Err(error) = written {
            context.fail(format!("the first file cannot be written: {error}"));
        }
    });
    context.join(vec![process]);
    context.world.reset_steps();
    context.world.state().setup.failing_per_mille = failing;
}
