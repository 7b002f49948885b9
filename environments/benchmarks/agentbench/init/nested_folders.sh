#!/bin/bash
# Written for hermes-rl, in place of AgentBench's script of this name, which is in none of its packages: folders in
# folders, several files called echo-love, of which one is executable and prints what the task asks for.
cd /home/agent || exit 1
for outer in 1 2 3; do
  for inner in a b c; do mkdir -p "folder$outer/$inner/deep"; done
done
echo 'echo "not this one"' > folder1/b/echo-love
echo 'echo "nor this one"' > folder3/c/deep/echo-love
printf '#!/bin/bash\necho "I love myself."\n' > folder2/c/deep/echo-love
chmod 644 folder1/b/echo-love folder3/c/deep/echo-love
chmod 755 folder2/c/deep/echo-love
