#!/usr/bin/env bash
# Waits until pre-checkin has passed for $COMMIT; fails when it ended otherwise. Needs gh and GH_TOKEN (actions: read).
# It reads the result that the commit has already: pre-checkin called as a reusable workflow would run its tests again.
set -euo pipefail

for _ in {1..100}; do
  # Empty while there is no run yet, or while the newest one has not ended.
  conclusion=$(gh run list --repo "$GITHUB_REPOSITORY" --workflow pre-checkin.yaml --event pull_request \
    --commit "$COMMIT" --limit 1 --json conclusion --jq '.[].conclusion')
  case $conclusion in
    success) exit 0 ;;
    '') sleep 60 ;;
    *)
      echo "::error::pre-checkin ended with '$conclusion' for $COMMIT, and heavy suites run after a pass only: push a fix, or re-run pre-checkin and then this job."
      exit 1
      ;;
  esac
done
echo "::error::pre-checkin has not ended for $COMMIT in 100 minutes: look at its run, and re-run this job once it has passed."
exit 1
