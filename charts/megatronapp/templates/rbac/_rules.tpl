{{/* What the operator does to jobs and what belongs to them, in every namespace that it watches. No right to read
Secrets: those of jobs are derived from the chart's key. */}}
{{- define "megatronapp.operatorRules" -}}
- apiGroups: [megatronapp.io]
  resources: [megatronjobs]
  verbs: [get, list, watch, delete] # delete: runPolicy.ttlSecondsAfterFinished
- apiGroups: [megatronapp.io]
  resources: [megatronjobs/status]
  verbs: [get, update, patch]
- apiGroups: [megatronapp.io]
  resources: [megatronjobs/finalizers] # owner references that block deletion
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [persistentvolumeclaims] # whether several nodes may write to it
  verbs: [get]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- range $name, $group := dict "volcano" "scheduling.volcano.sh" "coscheduling" "scheduling.x-k8s.io" "kai" "scheduling.run.ai" }}
{{- if get $.Values.rbac $name }}
- apiGroups: [{{ $group }}]
  resources: [podgroups]
  verbs: [get, create, patch, delete]
{{- end }}
{{- end }}
{{- end -}}

{{/* The door finds jobs and the Services of their hubs; it changes nothing. */}}
{{- define "megatronapp.doorRules" -}}
- apiGroups: [megatronapp.io]
  resources: [megatronjobs]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [services]
  verbs: [get]
{{- end -}}
