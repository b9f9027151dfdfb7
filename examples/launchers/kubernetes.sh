# shellcheck shell=bash
# vLLM in a cluster, after `kubectl apply -f kubernetes.yaml`. The address is http://127.0.0.1:8100; one engine at a time,
# because the port is a number.
LAUNCHER='kubectl create configmap speculation --from-file=config.yaml={speculation_file} --dry-run=client -o yaml | kubectl apply -f - && kubectl scale deployment/engine --replicas 1 && kubectl rollout status deployment/engine --timeout 30m && exec kubectl port-forward deployment/engine 8100:8000'
STOP='kubectl scale deployment/engine --replicas 0 && kubectl wait --for delete pod -l app=engine --timeout 5m'
