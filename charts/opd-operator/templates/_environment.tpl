{{- /* The operator's settings; opd_operator/settings.py refuses a variable that it does not know. */ -}}
{{- define "opd.environment" -}}
{{- $names := dict
  "TRAINER_IMAGE" .Values.images.trainer
  "SGLANG_IMAGE" .Values.images.sglang
  "VLLM_IMAGE" .Values.images.vllm
  "LMDEPLOY_IMAGE" .Values.images.lmdeploy
  "IMAGE_PULL_POLICY" .Values.defaults.imagePullPolicy
  "RAY_VERSION" .Values.defaults.rayVersion
  "CLUSTER_DOMAIN" .Values.defaults.clusterDomain
  "KUBERAY_OPERATOR_NAME" .Values.defaults.kuberayOperatorName
  "WATCH_NAMESPACES" (join "," .Values.watchNamespaces)
  "LOG_LEVEL" .Values.operator.logLevel
  "WORKERS" .Values.operator.workers
  "API_TIMEOUT_SECONDS" .Values.operator.apiTimeoutSeconds
  "RESYNC_SECONDS" .Values.operator.resyncSeconds
  "WATCH_STALE_SECONDS" .Values.operator.watchStaleSeconds
  "RETRY_BACKOFF_SECONDS" .Values.operator.retryBackoffSeconds
  "RETRY_BACKOFF_MAX_SECONDS" .Values.operator.retryBackoffMaxSeconds
  "CAPACITY_BACKOFF_MIN_SECONDS" .Values.operator.capacityBackoffMinSeconds
  "CAPACITY_BACKOFF_MAX_SECONDS" .Values.operator.capacityBackoffMaxSeconds
  "TRAINING_STATUS_SECONDS" .Values.operator.trainingStatusSeconds
  "LEADER_ELECTION" .Values.leaderElection.enabled
  "LEASE_NAME" (include "opd.fullname" .)
  "LEASE_DURATION_SECONDS" .Values.leaderElection.durationSeconds
  "LEASE_RENEW_SECONDS" .Values.leaderElection.renewSeconds
  "LEASE_RETRY_SECONDS" .Values.leaderElection.retrySeconds
  "HTTP_PORT" 8080
-}}
{{- range $name, $value := $names }}
- name: OPD_OPERATOR_{{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
- name: OPD_OPERATOR_LEASE_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: OPD_OPERATOR_IDENTITY
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end -}}
