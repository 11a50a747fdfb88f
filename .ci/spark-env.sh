# How this environment's spark-submit starts its JVM: set-up puts it into pyspark/conf, where spark-class looks for it.

# Spark says itself what is wrong, in one line, from whichever folder it is started.
SPARK_SUBMIT_OPTS="-Dlog4j2.configurationFile=$SPARK_CONF_DIR/log4j2.properties ${SPARK_SUBMIT_OPTS-}"

# All starts share what Java has made of Spark's classes. For that no folder on the class path may hold files; so this one
# is not on it, unless somebody has put settings here.
if [ ! -e "$SPARK_CONF_DIR/spark-defaults.conf" ]; then
    if [ -e "$SPARK_CONF_DIR/spark.jsa" ]; then
        SPARK_SUBMIT_OPTS="-XX:SharedArchiveFile=$SPARK_CONF_DIR/spark.jsa -Xlog:cds=off -Xlog:cds+dynamic=off \
            $SPARK_SUBMIT_OPTS"
    fi
    SPARK_CONF_DIR=$SPARK_CONF_DIR/none
fi

# Spark asks for Java's incubating vector module, which only its machine learning uses, and Java warns of it.
exec() {
    local word words=()
    for word; do [ "$word" = --add-modules=jdk.incubator.vector ] || words+=("$word"); done
    builtin exec "${words[@]}"
}
export -fn exec  # for spark-class alone
